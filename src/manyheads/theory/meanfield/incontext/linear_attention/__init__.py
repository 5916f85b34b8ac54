"""Linear attention on in-context linear regression, with merged and with separate key-query weights."""
