"""Contracts that every layer may know: identifiers and the words for where bytes lie."""
