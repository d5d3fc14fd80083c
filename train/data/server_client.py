"""One OpenAI-compatible server: whether it serves the target, and one completion of it.

Prompts go as token ids and tokens are asked back (`return_token_ids`, vLLM), so no tokenizer stands in between. Every
sampling setting is sent, neutral ones too: what is left out, vLLM takes from the model's generation_config.json, and a
top_k or repetition penalty from there would make another target of it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx2

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Answer, GenerationRequest

PROBE = "Grüße, 12345!\n\tdef f(x): return x  # 你好 🙂"
CHECK_TIMEOUT_S = 30.0
_TRY_AGAIN = (408, 425, 429)


class Unavailable(Exception):
    """A failure that may pass; `reached` says that the server had the request, so that the request may be the cause."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


@dataclass(frozen=True)
class TargetFacts:
    """What a server must agree with, and how its text becomes tokens when it sends no tokens.

    Attributes:
        probe, probe_ids: a text with the template's special tokens, and its token ids.
        end_of_turn: the token that ends an answer.
    """

    chat: TargetChat
    max_model_len: int
    probe: str
    probe_ids: list[int]
    end_of_turn: int


def target_facts(chat: TargetChat, *, max_model_len: int) -> TargetFacts:
    """The facts of one target."""
    probe = chat.user_turn_prefix(system=None) + PROBE
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    last = chat.encode_conversation(turns)[-1].token_ids[-1]
    end = last if last in chat.stop_token_ids else chat.stop_token_ids[0]
    return TargetFacts(chat, max_model_len, probe, chat.encode(probe), end)


class ServerClient:
    """Requests to one server."""

    def __init__(self, url: str, *, http: httpx2.AsyncClient, model: str | None, facts: TargetFacts) -> None:
        """`url` with or without the final /v1; `model` None takes the only one that is served."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.facts = facts
        self._http = http
        self._model = model
        self._served = model

    async def check(self) -> None:
        """Find the model's name and compare what the server says of itself with the target.

        Raises:
            Unavailable: no answer.
            ValueError: it serves something else.
        """
        listed = await self._ask("GET", "/v1/models", timeout_s=CHECK_TIMEOUT_S)
        models = {model["id"]: model for model in _list(listed, "data") if isinstance(model, dict) and "id" in model}
        name = self._model or (next(iter(models)) if len(models) == 1 else None)
        if name is None or name not in models:
            wanted = "one of several models" if self._model is None else f"{self._model!r}"
            raise ValueError(
                f"{self.url} is to serve {wanted}, and serves {', '.join(models) or 'none'}; name the target's among them "
                "in data.generation.servers.model"
            )
        length = models[name].get("max_model_len")
        if isinstance(length, int) and length < self.facts.max_model_len:
            raise ValueError(
                f"{self.url} takes {length} tokens, fewer than max_model_len {self.facts.max_model_len}; lower "
                f"data.generation.max_model_len to {length}, or start the server with a larger --max-model-len"
            )
        self._served = name
        await self._check_tokens(name)

    async def complete(self, request: GenerationRequest, *, timeout_s: float) -> Answer:
        """The answer to one request.

        Raises:
            Unavailable: no answer, or none that makes sense.
            ValueError: the server refuses the request.
        """
        body = {
            "model": self._served,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "seed": request.seed,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": request.stop_token_ids,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        reply = await self._ask("POST", "/v1/completions", body=body, timeout_s=timeout_s)
        return self._answer(request, reply)

    async def _check_tokens(self, name: str) -> None:
        body = {"model": name, "prompt": self.facts.probe, "add_special_tokens": False}
        reply = await self._ask("POST", "/tokenize", body=body, timeout_s=CHECK_TIMEOUT_S, absent_ok=True)
        if reply is not None and reply.get("tokens") != self.facts.probe_ids:
            raise ValueError(
                f"{self.url} splits text into other tokens than the target, so it serves another model; start it with the "
                "target of this recipe, or remove it from data.generation.servers.urls"
            )

    def _answer(self, request: GenerationRequest, reply: dict[str, Any] | None) -> Answer:
        choices = _list(reply, "choices")
        choice = choices[0] if choices and isinstance(choices[0], dict) else {}
        reason, token_ids, text = choice.get("finish_reason"), choice.get("token_ids"), choice.get("text")
        if reason not in ("stop", "length"):
            raise Unavailable(f"{self.url} ended an answer with {reason!r}", reached=True)
        if _are_tokens(token_ids):
            return {"id": request.id, "token_ids": token_ids, "finish_reason": reason}
        if not isinstance(text, str):
            raise Unavailable(f"{self.url} sent an answer without text or tokens", reached=True)
        token_ids = self.facts.chat.encode(text)
        if reason == "stop" and (not token_ids or token_ids[-1] not in request.stop_token_ids):
            token_ids.append(self.facts.end_of_turn)
        return {"id": request.id, "token_ids": token_ids, "finish_reason": reason, "retokenised": True}

    async def _ask(
        self, method: str, path: str, *, timeout_s: float, body: dict[str, Any] | None = None, absent_ok: bool = False
    ) -> dict[str, Any] | None:
        """JSON object that the server sends back; None when it knows no such path and that is fine."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(method, self.url + path, json=body)
        except TimeoutError as error:
            raise Unavailable(f"{self.url} did not answer within {timeout_s:g} s", reached=True) from error
        except (httpx2.RequestError, httpx2.StreamError) as error:
            reached = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            raise Unavailable(f"{self.url}: {type(error).__name__} {error}".rstrip(), reached=reached) from error
        if absent_ok and response.status_code in (404, 405):
            return None
        if response.status_code >= 500 or response.status_code in _TRY_AGAIN:
            raise Unavailable(f"{self.url} answers {response.status_code}: {_excerpt(response)}", reached=True)
        if response.status_code in (401, 403):
            raise ValueError(
                f"{self.url} answers {response.status_code}: {_excerpt(response)}; name the environment variable that holds "
                "its API key in data.generation.servers.api_key_variable"
            )
        if response.status_code >= 300:
            raise ValueError(f"{self.url}{path} refuses with {response.status_code}: {_excerpt(response)}")
        try:
            reply = json.loads(response.content)
        except ValueError as error:
            raise Unavailable(f"{self.url} sent no JSON: {_excerpt(response)}", reached=True) from error
        if not isinstance(reply, dict):
            raise Unavailable(f"{self.url} sent JSON that is no object: {_excerpt(response)}", reached=True)
        return reply


def _list(reply: dict[str, Any] | None, key: str) -> list[Any]:
    found = None if reply is None else reply.get(key)
    return found if isinstance(found, list) else []


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _excerpt(response: httpx2.Response) -> str:
    return " ".join(response.content[:400].decode("utf-8", "replace").split()) or "nothing"
