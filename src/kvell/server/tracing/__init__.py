"""Requests as spans of OpenTelemetry, for ``kvell serve --otlp-traces-endpoint``."""
