"""Access tokens of clients (OAUTHBEARER): the keys of their issuer, and whether one is believed.

Modules other than :mod:`~kept.node.security.oauth.token_checks` need PyJWT (the extra ``oauth``).
"""
