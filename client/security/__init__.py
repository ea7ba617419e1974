"""How a client is secured, and what both sides of a secured connection share: TLS contexts from PEM
files, SASL exchanges, JAAS and properties.
"""
