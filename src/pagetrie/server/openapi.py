"""The OpenAPI description of the HTTP interface, made from the routes and from the request models themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from pagetrie.server import protocol

_BODIES: dict[tuple[str, str], type[protocol.ApiRequest]] = {
    ("POST", "/v1/chat/completions"): protocol.ChatRequest,
    ("POST", "/v1/completions"): protocol.CompletionRequest,
    ("POST", "/v1/contexts"): protocol.CreateRequest,
    ("POST", "/v1/contexts/{context_id}/fork"): protocol.ForkRequest,
    ("POST", "/v1/contexts/{context_id}/append"): protocol.AppendRequest,
    ("POST", "/v1/admin/public_prefixes"): protocol.PublicPrefixRequest,
    ("POST", "/tokenize"): protocol.TokenizeRequest,
    ("POST", "/detokenize"): protocol.DetokenizeRequest,
}
_BY_SALT = re.compile(r"/v1/contexts(/\{context_id\})?|/v1/requests/.*")
_STATES: dict[str, dict[str, Any]] = {
    "/health": {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"enum": ["ok", "stopping", "dead"]}},
    },
    "/ready": {
        "type": "object",
        "required": ["status", "reasons", "checks"],
        "properties": {
            "status": {"enum": ["ready", "degraded", "unready"]},
            "reasons": {"type": "array", "items": {"type": "string"}},
            "checks": {"type": "object", "additionalProperties": {"enum": ["ok", "degraded", "failed"]}},
        },
    },
}
"""What is answered with 200, and with 503 too."""
_KINDS = {
    "/metrics": "text/plain",
    "/dashboard": "text/html",
    "/dashboard/{name}": "text/html",
    "/v1/admin/live/events": "text/event-stream",
}
_QUERIES: dict[str, tuple[str, dict[str, Any]]] = {"/v1/admin/find": ("text", {"minLength": 1, "maxLength": 200})}
_STRING = {"type": "string"}
_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}


def describe(routes: Iterable[object], version: str, *, keys: bool) -> dict[str, Any]:
    """The description as a JSON object, OpenAPI 3.1.

    Args:
        routes: the application's.
        version: pagetrie's.
        keys: whether callers need an API key.
    """
    components: dict[str, Any] = {"schemas": {**_body_schemas(), "Error": _ERROR}}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, APIRoute):
            path = route.path.replace(":path}", "}")
            for method in sorted(route.methods or ()):
                paths.setdefault(path, {})[method.lower()] = _operation(method, path, route)
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pagetrie", "version": version, "description": "OpenAI's API, and what pagetrie adds to it."},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
    return description


@cache
def _body_schemas() -> dict[str, Any]:
    models = sorted(set(_BODIES.values()), key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions


def _operation(method: str, path: str, route: APIRoute) -> dict[str, Any]:
    kind = _KINDS.get(path, "application/json")
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if method in ("GET", "DELETE") and _BY_SALT.fullmatch(path):
        parameters.append({"name": "cache_salt", "in": "query", "schema": {"type": "string"}})
    if path in _QUERIES:
        name, bounds = _QUERIES[path]
        parameters.append({"name": name, "in": "query", "required": True, "schema": {**_STRING, **bounds}})
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{method.lower()}_{re.sub(r'[^a-z]+', '_', path).strip('_')}",
        "parameters": parameters,
        "responses": {
            "200": {"description": "What was asked for.", "content": {kind: {}}},
            "default": {
                "description": "Why not.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if route.description:
        operation["summary"] = route.description
    state = _STATES.get(path)
    if state is not None:
        told = {kind: {"schema": state}}
        operation["responses"]["200"]["content"] = told
        operation["responses"]["503"] = {"description": "Not now.", "content": told}
    body = _BODIES.get((method, path))
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
