"""Query designs, one pipeline of all methods: sequences of each stage, and the weights that their answers determine.

===========  ========================================================================================================
sums         W_S and c from one token (`values.output_spaces`; behind a norm `gates.sphere_pairs`; a table)
gate         what moves the attention of all heads by a known amount tells them apart: copies of a pair (`gates.pairs`,
             on a sphere, of a table), zero tokens in front (`gates.count_gates`), one repeated token
values       heads are followed to as many probes as exhaust their output spaces (`values.probes`), ranks
             (`values.ranks`), and W_i = W_S O^+_i O_i (`values.output_spaces`)
logits       log-ratios of attention weights (`logits.ledger`), relative to a zero token, a base token, the
             row's own or a token at a fixed offset
forms        Theta_i of its rank from two sketches (`logits.sketches`), turns of offsets, links of scores
joint fit    all weights at once where answers are noisy (`refinement`)
===========  ========================================================================================================

A method is a folder with a `method.py` that puts its stages together; `extraction` chooses, verifies and certifies.
"""
