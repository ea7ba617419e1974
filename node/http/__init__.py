"""HTTP on the clients' port: health, metrics, the JSON API and the console."""
