"""Answers on connections whose request does not reach the app."""

from http import HTTPStatus

from kvell.server.api.http_errors import ApiError

BAD_REQUEST = ApiError(400, "this is not a valid HTTP request", "invalid_request_error")
TOO_SLOW = ApiError(408, "the head of the request did not arrive in time", "timeout_error")
FULL = ApiError(503, "too many connections; retry in a moment", "service_unavailable_error")


def raw_answer(error: ApiError) -> bytes:
    """Return the bytes of an answer after which the connection is closed."""
    response = error.response()
    response.headers["connection"] = "close"
    fields = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
    phrase = HTTPStatus(error.status).phrase.encode()
    status = b"HTTP/1.1 %d %b\r\n" % (error.status, phrase)
    return status + fields + b"\r\n" + bytes(response.body)
