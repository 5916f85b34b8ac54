"""A second solver, of one attention block at infinite key dimension, from the equations of one block.

It shares nothing with the general solver: the backward variable is not dressed with the error of the outputs, it has no
token index (pooling makes it w / T), and all sources of a neuron, and of a head, stand in one vector whose covariance
is a full matrix. Only full-batch descent on pooled squared losses with one output.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from manyheads.theory.dmft.problem import Problem


@dataclass(frozen=True)
class OneBlock:
    """Outputs (S, P), logits (S, P, T, T), pooled kernel (S, P, P); H0 and undressed RB (n, n)."""

    outputs: np.ndarray
    logits: np.ndarray
    pooled: np.ndarray
    correlation: np.ndarray
    response: np.ndarray
    dressing: np.ndarray  # c Delta of every token and time (n,)


def solve_one_block(problem: Problem) -> OneBlock:
    """Solve forward in time; rows over sources of a neuron on (chi | w0 | sO | s), of a head on (rV | rQ | rK | rO)."""
    steps, rows, samples, tokens = problem.steps, problem.rows, problem.samples, problem.tokens
    n, gain = steps * rows, problem.learning_rate * problem.richness
    learned, beta, gram = gain * problem.branch, problem.branch, problem.gram
    width = rows + 1 + 2 * n
    written, sent = rows + 1, rows + 1 + n  # where sO and s begin
    covariance = np.zeros((width, width))
    covariance[:rows, :rows] = gram
    covariance[rows, rows] = 1
    below, between, down = np.zeros((n, width)), np.zeros((n, width)), np.zeros((n, width))  # h0, h1, g0
    read = np.zeros((steps, width))  # w
    shares = np.zeros(n)  # c Delta, of every token and time
    heads = np.zeros((3 * n + steps, 3 * n + steps))  # covariance of rV, rQ, rK, rO
    mixed, back, to_query, to_key = (np.zeros((n, 3 * n + steps)) for _ in range(4))  # u, ebar, mQ, mK
    outputs, logits, pooled, responses = [], [], [], np.zeros((n, n))
    for t in range(steps):
        now, past, hi = slice(t * rows, (t + 1) * rows), slice(0, t * rows), (t + 1) * rows
        below[now, :rows] = np.eye(rows)
        read[t, rows] = 1
        if problem.embedding:
            below[now] += gain * gram @ (shares[past, None] * down[past]).reshape(t, rows, width).sum(0)
        read[t] += gain / tokens * shares[past] @ between[past]
        kernel = below[now] @ covariance @ below[:hi].T  # H0 (PT, hi)
        for source in range(3):
            place = source * n
            heads[place + t * rows : place + hi, place : place + hi] = kernel
            heads[place : place + hi, place + t * rows : place + hi] = kernel.T
        final = read[t] @ covariance @ read[: t + 1].T / tokens**2  # G (t + 1,)
        heads[3 * n + t, 3 * n : 3 * n + t + 1] = heads[3 * n : 3 * n + t + 1, 3 * n + t] = final
        through = below[now, sent : sent + t * rows] + learned * shares[past] * kernel[:, past]  # Kh
        above = read[t, written : written + t * rows] / tokens
        above = above + learned * shares[past] * np.repeat(final[:t], rows)  # Kg (t PT,)
        value, query, key = (
            np.eye(rows, 3 * n + steps, source * n + t * rows) + through @ history[past]
            for source, history in enumerate((back, to_query, to_key))
        )
        error = np.eye(1, 3 * n + steps, 3 * n + t)[0] + above @ mixed[past]
        products = query @ heads @ key.T  # A, for tokens of all samples
        along = value @ heads @ error  # <e v_b>
        logits.append(np.array([products[s : s + tokens, s : s + tokens] for s in range(0, rows, tokens)]))
        for sample in range(samples):
            own = slice(sample * tokens, (sample + 1) * tokens)
            later = slice(now.start + own.start, now.start + own.stop)
            pattern = softmax(logits[t][sample], axis=-1)
            moves = pattern * (along[own] - (pattern @ along[own])[:, None])  # M
            mixed[later] = pattern @ value[own]
            back[later] = np.outer(pattern.sum(0), error)
            to_query[later], to_key[later] = moves @ key[own], moves.T @ query[own]
        up = mixed[now] @ heads @ mixed[:hi].T  # U
        backward = sum(each[now] @ heads @ each[:hi].T for each in (back, to_query, to_key))  # B
        for place, block in ((written, up), (sent, backward)):
            covariance[place + t * rows : place + hi, place : place + hi] = block
            covariance[place : place + hi, place + t * rows : place + hi] = block.T
        steered = mixed[now, 3 * n : 3 * n + t]  # RO (PT, t)
        steered = steered + learned * (shares[past] * up[:, past]).reshape(rows, t, rows).sum(-1)
        between[now] = below[now] + beta * (np.eye(rows, width, written + t * rows) + steered @ read[:t] / tokens)
        answered = back[now, :hi] + to_query[now, n : n + hi] + to_key[now, 2 * n : 2 * n + hi]  # RB
        responses[now, :hi] = answered
        answered[:, past] += learned * shares[past] * backward[:, past]
        down[now] = read[t] / tokens + beta * (np.eye(rows, width, sent + t * rows) + answered @ below[:hi])
        means = between[now].reshape(samples, tokens, width).mean(1)
        outputs.append(means @ covariance @ read[t] / problem.richness)
        pooled.append(means @ covariance @ means.T)
        shares[now] = np.repeat(problem.loss_weights[t] * (problem.flat_targets[:, 0] - outputs[t]), tokens)
    return OneBlock(np.array(outputs), np.array(logits), np.array(pooled), heads[:n, :n], responses, shares)
