"""The version of this library; processes of one cluster have the same."""

VERSION = "0.1.0"
