"""The smallest configuration of every registered study, and how many replicates its contract is checked with."""

from manyheads.attention.studies.costs import Costs
from manyheads.attention.studies.order_blindness import OrderBlindness
from manyheads.bigram.studies.l1_against_sgd import L1AgainstSGD
from manyheads.bigram.studies.lags import PlantedLags
from manyheads.bigram.studies.sample_law import SampleLaw
from manyheads.bigram.studies.screening import ScreeningCost
from manyheads.bigram.studies.softmax import Softmax
from manyheads.bigram.studies.stage_two import StageTwo
from manyheads.bigram.studies.transfer import TransferCost
from manyheads.bigram.studies.two_stages import TwoStages
from manyheads.demo.text import TextTraining
from manyheads.joma.studies.clouds import Clouds
from manyheads.joma.studies.invariants import Invariants
from manyheads.joma.studies.latent_tree import LatentTreeStudy
from manyheads.joma.studies.neurons import Neurons
from manyheads.joma.studies.real_text import RealText
from manyheads.joma.studies.rebound import Rebound
from manyheads.joma.studies.salient_first import SalientFirst
from manyheads.joma.studies.scan_and_snap import ScanAndSnap
from manyheads.joma.studies.winners import Winners
from manyheads.limits.studies.approach import Approach
from manyheads.limits.studies.attention_over_heads import AttentionOverHeads
from manyheads.limits.studies.coordinate_check import CoordinateCheckStudy
from manyheads.limits.studies.head_diversity import HeadDiversity
from manyheads.limits.studies.infinite_depth import InfiniteDepth
from manyheads.limits.studies.infinite_heads import InfiniteHeads
from manyheads.limits.studies.infinite_key_dim import InfiniteKeyDim
from manyheads.limits.studies.lazy_to_rich import LazyToRich
from manyheads.limits.studies.rate_transfer import RateTransfer
from manyheads.limits.studies.stability import KeyDimStability
from manyheads.recovery.studies.acceptance import Acceptance
from manyheads.recovery.studies.hard_instances import HardInstances
from manyheads.recovery.studies.noise import Noise
from manyheads.recovery.studies.passive_against_queries import PassiveAgainstQueries
from manyheads.recovery.studies.stages import Stages
from manyheads.recovery.studies.violations import Violations

SMALL = {
    "recovery/violations": (Violations(("benign",), dim=3, samples=200, restarts=1), 2),
    "recovery/hard-instances": (HardInstances((6, 2), (6, 4, 2), samples=300, evaluations=40), 2),
    "recovery/passive-against-queries": (PassiveAgainstQueries((4, 8), heads=1), 2),
    "recovery/noise": (Noise((0.01, 0.1), dim=3, heads=1, count=120), 2),
    "recovery/stages": (Stages((2,), dim=4, count=1200, polished=60, points=5), 2),
    "recovery/acceptance": (Acceptance((2,), (2,), (4, 6), (0.1, 0.2), layers=1, count=200), 2),
    "joma/clouds": (Clouds(samples=(64, 256), horizon=2.0, neurons=2, activation="identity"), 2),
    "joma/salient-first": (SalientFirst(resolution=0.2), 2),
    "joma/rebound": (Rebound(vectors=2, resolution=0.5, steps=96), 2),
    "joma/latent-tree": (LatentTreeStudy(depth=3, samples=(64, 128)), 2),
    "joma/neurons": (
        Neurons(
            (8,), (8,), 6, leaves=9, keeps=(1.0,), width=8, layers=2, steps=150, batch=12, learning_rate=0.01, tested=12
        ),
        2,
    ),
    "joma/scan-and-snap": (ScanAndSnap(learning_rate_ratios=(0.3, 3.0), classes=2, distinct=2, common=1, reach=8.0), 2),
    # Trained in tests/demo/test_rebound.py as well, by the same compiled programs.
    "demo/text": (TextTraining(key_dim=4, heads=2, depth=1, length=16, batch=2, steps=3, snapshots=3), 2),
    "attention/costs": (Costs(width=8, heads=2, lengths=(4, 8, 16)), 2),
    "attention/order-blindness": (
        OrderBlindness(lengths=(6,), steps_per_token=5, key_dim=4, heads=2, depth=1, batch=8),
        2,
    ),
    "joma/real-text": (
        RealText(
            depths=(1, 2),
            learning_rates=(1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4),
            key_dim=4,
            length=8,
            batch=2,
            steps=6,
            snapshots=3,
        ),
        2,
    ),
    "bigram/stage-two": (StageTwo(lengths=(40, 80), batch=64, samples=1536, rate=0.05, ratio=1.0), 2),
    "bigram/sample-law": (
        SampleLaw(
            lengths=(20, 40),
            longest=(50, 100),
            vocabularies=(3, 4),
            noises=(2.0, 4.0),
            noise=4.0,
            batch=4,
            growth=0.1,
            runs=1,
            simulated=4,
        ),
        2,
    ),
    "bigram/screening": (ScreeningCost(lengths=(20, 40), trained_length=20, searches=1), 2),
    "bigram/lags": (PlantedLags(sizes=(1500, 3000), lags=6, planted=1, vocabulary=8), 2),
    "bigram/transfer": (TransferCost(correlations=(1.0, 0.7), lengths=(20, 40), pilot=400, searches=1), 2),
    "bigram/softmax": (Softmax(shares=(0.5, 0.62), length=24, batch=8, steps=40), 2),
    "bigram/l1-against-sgd": (L1AgainstSGD(batches=(64, 128), length=80, samples=18_432, rate=0.05), 2),
    "bigram/two-stages": (TwoStages(length=60, batch=8, noise_ratio=2.0, duration=1.5), 2),
    "joma/invariants": (
        Invariants(
            activations=("gelu",),
            tokens=3,
            queries=2,
            contexts=4,
            neurons=2,
            horizon=2.0,
            step=0.25,
            records=8,
            learning_rates=(0.2, 0.1),
        ),
        2,
    ),
    "joma/winners": (Winners(tokens=3, contexts=4, records=4, level=3.0), 2),
    # Coordinate check and head diversity train the same networks, by the same compiled programs, and so does
    # tests/limits/test_finite.py; its sweep is that of rate-transfer.
    "limits/coordinate-check": (
        CoordinateCheckStudy(
            axes=("key_dim",),
            schemes=("limits", "half-logit", "standard"),
            base=(4, 2, 2),
            key_dims=(4, 8),
            checkpoints=(1, 2),
            batch=16,
            networks=1,
        ),
        2,
    ),
    "limits/head-diversity": (HeadDiversity(base=(4, 2, 2), key_dims=(4, 8), checkpoints=(1, 2)), 2),
    "limits/attention-over-heads": (
        AttentionOverHeads(key_dims=(1, 2), theory_key_dims=(), heads=4, steps=2, networks=3, oversampling=1),
        2,
    ),
    "limits/infinite-heads": (
        InfiniteHeads(
            heads_counts=(2, 4), key_dim=2, logit_exponents=(0.5,), depth=1, steps=3, networks=4, oversampling=1
        ),
        2,
    ),
    "limits/approach": (
        Approach(
            # Heads and replicates enough that distances stand out from the noise, and claims can change.
            axes=("key_dim",),
            schemes=("limits", "standard"),
            base=(2, 8, 1),
            key_dims=(1, 2, 4),
            steps=3,
            networks=2,
        ),
        4,
    ),
    "limits/infinite-key-dim": (
        InfiniteKeyDim(key_dims=(2, 4), heads_counts=(2,), depth=1, steps=3, networks=2),
        2,
    ),
    "limits/infinite-depth": (
        InfiniteDepth(depths=(4, 8, 16), key_dim=2, heads=2, continuum_cells=2, steps=3, networks=2),
        2,
    ),
    "limits/lazy-to-rich": (
        LazyToRich(richness=(0.03, 0.1, 1.0, 2.0), key_dims=(2, 4), heads=2, depth=1, steps=3, networks=2),
        2,
    ),
    "limits/key-dim-stability": (KeyDimStability(key_dims=(4, 8), heads_counts=(4,), steps=3, networks=16), 3),
    "limits/rate-transfer": (
        RateTransfer(
            schemes=("limits", "standard"), base=(4, 2, 2), key_dims=(4, 8), steps=8, lowest=0.01, ratio=4.0, points=3
        ),
        2,
    ),
}
