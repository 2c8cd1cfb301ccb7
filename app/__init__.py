"""Halflife: hybrid search on Elasticsearch that knows how old a passage is."""
