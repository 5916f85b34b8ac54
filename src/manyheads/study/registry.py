"""Registry of the studies, wing by wing: a table of text, so that listing them imports nothing.

`study` imports no theory of its own accord: it imports the module of a study when the study is named, and not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from manyheads._user_modules import FILES as FILES
from manyheads._user_modules import import_module, load_file
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.study.base import Study


class Entry(NamedTuple):
    """Place of a study and its claim in one line."""

    place: str
    claim: str


STUDIES: dict[str, Entry] = {
    "attention/order-blindness": Entry(
        "manyheads.studies.attention.order_blindness:OrderBlindness",
        "Pooling is order-blind, an RNN forgets with distance, attention does neither",
    ),
    "attention/costs": Entry(
        "manyheads.studies.attention.costs:Costs",
        "Exact costs, depth and crossover length of attention, an RNN and a pooled MLP",
    ),
    "attention/vanishing-gradients": Entry(
        "manyheads.studies.attention.vanishing_gradients:VanishingGradients",
        "Gradients of an RNN vanish or explode with length and depth; in attention not",
    ),
    "attention/random-features": Entry(
        "manyheads.studies.attention.random_features:RandomFeatures",
        "Positive random features err less than trigonometric ones where attention is small",
    ),
    "recovery/stages": Entry(
        "manyheads.studies.recovery.stages:Stages",
        "The refined sum and its span lower the error; the joint fit reaches rounding",
    ),
    "recovery/one-step": Entry(
        "manyheads.studies.recovery.steps.one_step:OneStep",
        "One gradient step from zero is r^-1/2 close to the sum of projections",
    ),
    "recovery/concentration": Entry(
        "manyheads.studies.recovery.steps.concentration:Concentration",
        "Softmax does not concentrate; given Hamming weights its expectation does",
    ),
    "recovery/boolean-tokens": Entry(
        "manyheads.studies.recovery.steps.boolean_tokens:BooleanTokens",
        "Gaussian estimates of Boolean logits are off by d^-1/2; far from lattices by 1/d",
    ),
    "recovery/crude-hull": Entry(
        "manyheads.studies.recovery.steps.crude_hull:CrudeHull",
        "The crude hull does not give the span at any stable rank; high-margin rows do",
    ),
    "recovery/acceptance": Entry(
        "manyheads.studies.recovery.acceptance:Acceptance",
        "Rows are certified as often as the softmax vectors of all heads agree",
    ),
    "recovery/noise": Entry(
        "manyheads.studies.recovery.noise:Noise",
        "On noisy labels the student attains the parametric rate from random starts",
    ),
    "recovery/leakage": Entry(
        "manyheads.studies.recovery.leakage:Leakage",
        "Least squares on noisy or rounded answers costs the square of the noise",
    ),
    "recovery/span-cost": Entry(
        "manyheads.studies.recovery.steps.span_cost:SpanCost",
        "Examples for the span grow as d^2, and faster with length and heads",
    ),
    "recovery/thresholds": Entry(
        "manyheads.studies.recovery.thresholds:Thresholds",
        "Each assumption weakened until the span is lost, beside its stated bound",
    ),
    "recovery/violations": Entry(
        "manyheads.studies.recovery.violations:Violations",
        "A violated assumption breaks the stages that need it and is refused by name",
    ),
    "recovery/hard-instances": Entry(
        "manyheads.studies.recovery.hard_instances:HardInstances",
        "A restarted student fits ordinary layers and fails on parity and wave layers",
    ),
    "recovery/layer-and-mlp": Entry(
        "manyheads.studies.recovery.layer_and_mlp:LayerAndMlp",
        "A layer and its MLP are learned together from examples, to rounding",
    ),
    "recovery/passive-against-queries": Entry(
        "manyheads.studies.recovery.passive_against_queries:PassiveAgainstQueries",
        "Random examples and queries recover the layer; queries save computation only",
    ),
    "limits/coordinate-check": Entry(
        "manyheads.studies.scaling.coordinate_check:CoordinateCheckStudy",
        "Coordinate check: the RMS update of every module is independent of N, H and L",
    ),
    "limits/learning-rate-transfer": Entry(
        "manyheads.studies.scaling.learning_rates.learning_rate_transfer:LearningRateTransfer",
        "The optimal learning rate is independent of N, H, L; standard scaling shifts it",
    ),
    "limits/muon-coordinates": Entry(
        "manyheads.studies.scaling.muon_coordinates:MuonCoordinates",
        "Under Muon, updates are independent of N, H, L, D; common recipes break",
    ),
    "limits/muon-transfer": Entry(
        "manyheads.studies.scaling.learning_rates.muon_transfer:MuonTransfer",
        "Muon's optimal learning rate is independent of N, H, L; common recipes shift it",
    ),
    "limits/weight-decay": Entry(
        "manyheads.studies.scaling.learning_rates.weight_decay:WeightDecay",
        "The table's learning rate transfers with independent decay; decay does not make one rate do",
    ),
    "limits/batch-and-horizon": Entry(
        "manyheads.studies.scaling.learning_rates.batch_and_horizon:BatchAndHorizon",
        "Adam's optimal learning rate grows as the root of the batch, falls as steps^-0.32",
    ),
    "limits/initialization": Entry(
        "manyheads.studies.dmft.initialization:Initialization",
        "Before training kernels deviate as 1/H (squared); logits have kurtosis 3 + 6/N",
    ),
    "limits/head-diversity": Entry(
        "manyheads.studies.dmft.head_diversity:HeadDiversity",
        "The variance of logits over heads goes as 1/N at logit exponent 1, N^0 at 1/2",
    ),
    "limits/key-dim-stability": Entry(
        "manyheads.studies.dmft.key_dim_stability:KeyDimStability",
        "At logit exponent 1/2 gradients below attention grow with N during training",
    ),
    "limits/infinite-key-dim": Entry(
        "manyheads.studies.dmft.infinite_key_dim:InfiniteKeyDim",
        "Training converges to its mean-field limit as N grows, for any number of heads",
    ),
    "limits/infinite-heads": Entry(
        "manyheads.studies.dmft.infinite_heads:InfiniteHeads",
        "Training converges to its mean-field limit as H grows, at both logit exponents",
    ),
    "limits/infinite-depth": Entry(
        "manyheads.studies.dmft.infinite_depth:InfiniteDepth",
        "Infinite depth: attention learns at depth exponent 1 and stays uniform at 1/2",
    ),
    "limits/forecast": Entry(
        "manyheads.studies.dmft.forecast:Forecast",
        "The limit and two small ensembles forecast the loss curve of 512 heads within 1%",
    ),
    "limits/weight-movement": Entry(
        "manyheads.studies.dmft.weight_movement:WeightMovement",
        "Attention weights move by L^(-1/2) at depth exponent 1/2 and by order one at 1",
    ),
    "limits/logit-exponent": Entry(
        "manyheads.studies.scaling.text.logit_exponent:LogitExponent",
        "Larger N favours logit exponent 1/2 at fixed steps, exponent 1 at fixed compute",
    ),
    "limits/lazy-to-rich": Entry(
        "manyheads.studies.dmft.lazy_to_rich:LazyToRich",
        "Features move as richness squared up to 0.1, and saturate in rich training",
    ),
    "limits/approach": Entry(
        "manyheads.studies.scaling.approach:Approach",
        "Loss curves and kernels converge as N, H, L grow, except under standard scaling",
    ),
    "joma/invariants": Entry(
        "manyheads.studies.joma.invariants:Invariants",
        "Gradient flow conserves z^2 - |v|^2 (linear) and z - |v|^2/2 (exp attention)",
    ),
    "joma/attention-functions": Entry(
        "manyheads.studies.joma.attention_functions:AttentionFunctions",
        "Attention f(z)x conserves F(z) - |v|^2/2 with F' = f/f'; normalized, no weights",
    ),
    "joma/nearly-orthogonal": Entry(
        "manyheads.studies.joma.nearly_orthogonal:NearlyOrthogonal",
        "Theorem 1 drifts as the cosines of the embeddings, as their couplings predict",
    ),
    "joma/winners": Entry(
        "manyheads.studies.joma.winners:Winners",
        "Under exp attention one token takes all at time sqrt(pi/2)/max|Delta|",
    ),
    "joma/clouds": Entry(
        "manyheads.studies.joma.clouds:Clouds",
        "SGD on an isotropic mixture follows theorem 3 up to noise of order n^(-1/2)",
    ),
    "joma/salient-first": Entry(
        "manyheads.studies.joma.salient_first:SalientFirst",
        "Salient components are learned first: ln(1/delta) = exp(mu^2/2) t - B(mu)",
    ),
    "joma/rebound": Entry(
        "manyheads.studies.joma.rebound:Rebound",
        "Attention entropy and stable rank drop, then rebound, as components saturate",
    ),
    "joma/latent-tree": Entry(
        "manyheads.studies.joma.latent_tree:LatentTreeStudy",
        "Leaves of a latent tree co-occur as theorem 5 says, with correlation rho^(2H)",
    ),
    "joma/neurons": Entry(
        "manyheads.studies.joma.neurons:Neurons",
        "Training does not raise the correlation of hidden neurons with latents (Table 1)",
    ),
    "joma/scan-and-snap": Entry(
        "manyheads.studies.joma.scan_and_snap:ScanAndSnap",
        "Attention logits of exchangeable next tokens follow one trajectory, then stop",
    ),
    "joma/real-text-variants": Entry(
        "manyheads.studies.joma.text.real_text_variants:RealTextVariants",
        "On words the bottom layer's entropy drops first; it rebounds in post-norm blocks",
    ),
    "joma/shuffled-labels": Entry(
        "manyheads.studies.joma.networks.shuffled_labels:ShuffledLabels",
        "Images that class means decide are learned first, with shuffled labels too",
    ),
    "joma/hierarchical-prior": Entry(
        "manyheads.studies.joma.networks.hierarchical_prior:HierarchicalPrior",
        "A pattern that c labels share is won c times sooner in the layer of theorem 2",
    ),
    "joma/wide-networks": Entry(
        "manyheads.studies.joma.networks.wide_networks:WideNetworks",
        "The first of n neurons is won after a time ~ 1/(n + 1), if attention is aligned",
    ),
    "joma/real-text": Entry(
        "manyheads.studies.joma.text.real_text:RealText",
        "Attention entropy of the bottom layer drops and rebounds in training on text",
    ),
    "bigram/two-stages": Entry(
        "manyheads.studies.bigram.two_stages:TwoStages",
        "The two-stage algorithm recovers all positions; the refit error is of order 1/n",
    ),
    "bigram/l1-against-sgd": Entry(
        "manyheads.studies.bigram.l1_against_sgd:L1AgainstSGD",
        "An l1 penalty lowers the raw loss; rounded, plain SGD recovers the task too",
    ),
    "bigram/sample-complexity": Entry(
        "manyheads.studies.bigram.sample_complexity:SampleComplexity",
        "From scratch the samples grow as T ln T; the share of sign flips is predicted",
    ),
    "bigram/initializations": Entry(
        "manyheads.studies.bigram.from_scratch.initializations:Initializations",
        "Initial values above the drift 1/(T K_Q) flip half of the signs; softmax corrects them",
    ),
    "bigram/frequencies": Entry(
        "manyheads.studies.bigram.from_scratch.frequencies:Frequencies",
        "The laws hold at any token frequencies; values transfer across frequencies and structures",
    ),
    "bigram/large-vocabulary": Entry(
        "manyheads.studies.bigram.from_scratch.large_vocabulary:LargeVocabulary",
        "At N = 100 and 500 the values peak and fall, and the attention overshoots, as predicted",
    ),
    "bigram/stability": Entry(
        "manyheads.studies.bigram.from_scratch.stability:Stability",
        "The largest rate grows as sqrt(B / T); the penalty of the theory is below the noise",
    ),
    "bigram/stage-two": Entry(
        "manyheads.studies.bigram.stage_two:StageTwo",
        "Initialized with signal, proximal SGD needs samples independent of the length",
    ),
    "bigram/sparsity": Entry(
        "manyheads.studies.bigram.sparsity:Sparsity",
        "Samples grow as Q from scratch, and as Q^2 where positions are scored one by one",
    ),
    "bigram/softmax": Entry(
        "manyheads.studies.bigram.softmax:Softmax",
        "Softmax and linear heads train alike early, and to the end for equal weights",
    ),
    "bigram/transformer": Entry(
        "manyheads.studies.bigram.transformer:BigramTransformer",
        "A two-layer transformer with Adam learns the task in two stages, and transfers",
    ),
    "bigram/transfer": Entry(
        "manyheads.studies.bigram.transfer:TransferCost",
        "A value matrix of correlation rho finds the positions in C/rho^2 samples",
    ),
    "bigram/screening": Entry(
        "manyheads.studies.bigram.screening:ScreeningCost",
        "Screening finds the positions of a sparse contextual bigram in O(log T) samples",
    ),
    "bigram/lags": Entry(
        "manyheads.studies.bigram.lags:PlantedLags",
        "One shared transition finds planted lags of real text; counting lag by lag fails",
    ),
    "meanfield/hopfield-finite-size": Entry(
        "manyheads.studies.meanfield.hopfield.finite_size:FiniteSize",
        "Overlaps of N neurons deviate from the mean-field map by N^(-1/2)",
    ),
    "meanfield/attractors": Entry(
        "manyheads.studies.meanfield.hopfield.attractors:AttractorStudy",
        "The sign of the Lyapunov exponent decides if finite networks stay together",
    ),
    "meanfield/stationary-moments": Entry(
        "manyheads.studies.meanfield.hopfield.stationary_moments:StationaryMoments",
        "In chaos time averages converge to the mean field as N grows, tokens do not",
    ),
    "meanfield/prompt-length": Entry(
        "manyheads.studies.meanfield.incontext.prompt_length:PromptLength",
        "With n pairs in a prompt the loss exceeds its limit by exactly c/n",
    ),
    "meanfield/mlp-width": Entry(
        "manyheads.studies.meanfield.incontext.mlp_width:MLPWidth",
        "Losses at width N deviate by N^(-1/2) if amplitudes start well above N^(-1/2)",
    ),
    "meanfield/attention-speed": Entry(
        "manyheads.studies.meanfield.incontext.attention_speed:AttentionSpeed",
        "The two-timescale limit errs as 1/r at attention speed r, but only from r = 1000",
    ),
    "meanfield/benign-landscape": Entry(
        "manyheads.studies.meanfield.incontext.benign_landscape:BenignLandscape",
        "Saddles lie at half sums of missed eigenvalues; each has negative curvature",
    ),
    "meanfield/saddle-escape": Entry(
        "manyheads.studies.meanfield.incontext.saddle_escape:SaddleEscape",
        "A missed feature is learned after (g^2/kappa) ln(1/eps), g^2 its foreign mass",
    ),
    "meanfield/saddle-to-saddle": Entry(
        "manyheads.studies.meanfield.incontext.saddle_to_saddle:SaddleToSaddle",
        "Merged key-query weights learn in one drop, separate ones in one per eigenvector",
    ),
    "meanfield/prompt-training": Entry(
        "manyheads.studies.meanfield.incontext.prompt_training:PromptTraining",
        "SGD on 10,000 prompts waits at the saddle level and escapes as the mean field says",
    ),
    "meanfield/head-particles": Entry(
        "manyheads.studies.meanfield.incontext.head_particles:HeadParticlesStudy",
        "Logits of H averaged heads deviate from their mean-field limit by H^(-1/2)",
    ),
    "meanfield/contrastive-sgd": Entry(
        "manyheads.studies.meanfield.contrastive.contrastive_sgd:ContrastiveSgd",
        "SGD for contrastive learning follows the overlap ODE with error n^(-1/2)",
    ),
    "meanfield/feature-basins": Entry(
        "manyheads.studies.meanfield.contrastive.feature_basins:FeatureBasins",
        "Second moments decide growth at Q = 0; higher moments decide basin and stability",
    ),
    "meanfield/noise-correlation": Entry(
        "manyheads.studies.meanfield.contrastive.noise_correlation:NoiseCorrelation",
        "Negatively correlated augmentation noise helps if it is moderate, hurts if strong",
    ),
    "meanfield/sparse-penalty": Entry(
        "manyheads.studies.meanfield.contrastive.sparse_penalty:SparsePenalty",
        "SGD with an L1 penalty follows McKean-Vlasov particles with error n^(-1/2)",
    ),
    "demo/text": Entry(
        "manyheads.demo.text:TextTraining",
        "A small transformer predicts text better than bigram and trigram models",
    ),
}


def load(name: str) -> type[Study]:
    """Return the class of a registered study, or of a user's own: ``package.module:Class``, ``file.py:Class``.

    A file that holds a single study needs no class: ``file.py``.

    Raises
    ------
    UsageError
        No such study, and the message lists what is near; or its module cannot be imported.
    """
    if name in STUDIES:
        place = STUDIES[name].place
    elif ":" in name:
        place = name
    elif name.endswith(".py"):
        from manyheads.study.base import only_study

        return only_study(name)
    else:
        raise UsageError(f"no study is called {name!r}{_suggestion(name)}; 'manyheads study list' shows all")
    module, _, attribute = place.rpartition(":")
    loaded = _load(module)
    found = getattr(loaded, attribute, None)
    from manyheads.study.base import Study

    if not (isinstance(found, type) and issubclass(found, Study)):
        raise UsageError(f"{module} has no study {attribute!r}: expected a class that derives from manyheads.Study")
    return found


def _load(module: str) -> object:
    if module.endswith(".py"):
        return load_file(Path(module))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        remedy = "check the spelling, or give the file as PATH.py:Class"
        raise UsageError(f"no module {module!r} can be imported: {remedy}") from error


def _suggestion(name: str) -> str:
    import difflib

    near = [one for one in STUDIES if one.startswith(f"{name}/")][:3]
    near = near or difflib.get_close_matches(name.lower(), STUDIES, n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
