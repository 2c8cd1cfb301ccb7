"""Elasticsearch templates, each a file that Kibana's Dev Tools accept as it is. No code lives here."""
