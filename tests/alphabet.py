"""Characters of drawn texts: to tabulate all of Unicode takes Hypothesis seconds in a new checkout."""

ALPHABET = "aZ_09 .-/\\\"'{}\0\n\t\x7fé漢\u2028\ufeff😀"
