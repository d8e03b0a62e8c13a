"""`cluster.shared_state` in Redis: one script per lease, run where the numbers are. The one owner of redis.

1. A lease is one `EVALSHA`: Redis runs the script alone, by its own clock, so routers' clocks do not matter.
   A Redis that does not know the script (restarted, `SCRIPT FLUSH`) gets it again within the same call.
2. The whole call, connecting included, has `deadline_s`. Too late, refused, full or read-only: it is
   `SharedStateLost`, and the connection, whose answer may still be on its way, is dropped.
3. Every key expires: what a tenant used after it has drained, places and routers after `ttl_s`.

Keys: `{baton}:used:TENANT`, `{baton}:slots:TENANT`, `{baton}:routers`. One hash tag: in a Redis Cluster they
are on one node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cluster.errors import ConfigError
from cluster.ids import RouterId
from cluster.shared_state import FORGET_S, BucketGrant, LeaseAsk, LeaseGrant, SharedStateLost

# KEYS: used, slots, routers. ARGV: router, ttl in s, most slots (-1: no limit), slots, running, seconds to
# forget, then per bucket: name, per minute, want, least, back. Returns decimal strings: routers, slots, then
# per bucket granted, used.
_SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local router, ttl = ARGV[1], tonumber(ARGV[2])
local most, slots, running = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local ttl_ms = math.ceil(ttl * 1000)

redis.call('ZADD', KEYS[3], now + ttl, router)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('(%.6f', now))
redis.call('PEXPIRE', KEYS[3], ttl_ms)
local reply = {tostring(redis.call('ZCARD', KEYS[3])), '0'}

if most >= 0 then
  local others, held = 0, redis.call('HGETALL', KEYS[2])
  for i = 1, #held, 2 do
    local count, till = string.match(held[i + 1], '^(%d+) (.+)$')
    if tonumber(till) < now then
      redis.call('HDEL', KEYS[2], held[i])
    elseif held[i] ~= router then
      others = others + tonumber(count)
    end
  end
  local granted = math.max(0, math.min(slots, most - others))
  local kept = math.max(granted, running)
  if kept > 0 then
    redis.call('HSET', KEYS[2], router, string.format('%d %.6f', kept, now + ttl))
    redis.call('PEXPIRE', KEYS[2], ttl_ms)
  else
    redis.call('HDEL', KEYS[2], router)
  end
  reply[2] = tostring(granted)
end

local longest = 0
for i = 7, #ARGV, 5 do
  local name, per_min, want, least, back =
    ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  local was = redis.call('HMGET', KEYS[1], name, name .. '.at')
  local used = tonumber(was[1] or '0') - per_min / 60 * math.max(0, now - tonumber(was[2] or now))
  used = math.max(0, math.max(0, used) - back)
  local granted = math.max(0, math.min(want, per_min - used))
  if granted < least then granted = 0 end
  used = used + granted
  redis.call('HSET', KEYS[1], name, string.format('%.17g', used), name .. '.at', string.format('%.6f', now))
  longest = math.max(longest, used / (per_min / 60))
  reply[#reply + 1] = string.format('%.17g', granted)
  reply[#reply + 1] = string.format('%.17g', used)
end
if #ARGV >= 7 then
  redis.call('PEXPIRE', KEYS[1], math.ceil((longest + tonumber(ARGV[6])) * 1000))
end
return reply
"""


def check_address(url: str) -> None:
    """
    Raises:
        ConfigError: it is no address of a Redis. It may have a password, so the message does not repeat it.
    """
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("`--redis` must be redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH")


class RedisState:
    """Implements `cluster.shared_state.SharedState` for one router."""

    def __init__(self, url: str, router: RouterId, *, ttl_s: float, deadline_s: float) -> None:
        """Connects when it is first needed.

        Raises:
            ConfigError: not a Redis address, or the package `redis` is missing.
        """
        try:
            import redis
            import redis.asyncio
        except ImportError as error:
            raise ConfigError("several routers need the package `redis`: pip install redis") from error
        check_address(url)
        self._client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        self._script = self._client.register_script(_SCRIPT)
        self._errors = (redis.RedisError, OSError)
        self._calls: set[asyncio.Task[Any]] = set()
        self._router = router
        self._ttl_s = ttl_s
        self._deadline_s = deadline_s

    async def lease(self, ask: LeaseAsk) -> LeaseGrant:
        most = -1 if ask.most_slots is None else ask.most_slots
        arguments: list[str | float] = [most, ask.slots, ask.running, FORGET_S]
        for name, bucket in ask.buckets.items():
            arguments += [name, bucket.per_min, bucket.want, bucket.least, bucket.back]
        num_routers, slots, *numbers = await self._call(ask.tenant, arguments)
        pairs = zip(ask.buckets, numbers[::2], numbers[1::2], strict=True)
        grants = {name: BucketGrant(float(granted), float(used)) for name, granted, used in pairs}
        return LeaseGrant(grants, int(slots), int(num_routers))

    async def check(self) -> int:
        return int((await self._call("", [-1, 0, 0, FORGET_S]))[0])

    async def close(self) -> None:
        """It is not counted any more, if Redis can be told."""
        try:
            await self._in_time(lambda: self._client.zrem("{baton}:routers", self._router))
        except SharedStateLost:
            pass  # it forgets this router by itself
        finally:
            if self._calls:
                await asyncio.wait(self._calls, timeout=self._deadline_s)
            await self._client.aclose()

    async def _call(self, tenant: str, arguments: Sequence[str | float]) -> list[str]:
        keys = [f"{{baton}}:used:{tenant}", f"{{baton}}:slots:{tenant}", "{baton}:routers"]
        words = [self._router, self._ttl_s, *arguments]
        reply: list[str] = await self._in_time(lambda: self._script(keys=keys, args=words))
        return reply

    async def _in_time(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The call has a task of its own: whatever the client library makes of being cancelled concerns
        nobody else."""
        task = asyncio.create_task(call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._deadline_s)
        finally:
            if not task.done():
                task.add_done_callback(_ignore)
                task.cancel()
        if not done:
            raise SharedStateLost(f"Redis did not answer within {self._deadline_s:g} s")
        try:
            return task.result()
        except self._errors as error:
            raise SharedStateLost(f"Redis cannot be used: {error}") from error


def _ignore(task: asyncio.Task[Any]) -> None:
    """Of a call that was given up: take note of its end, so that nobody is told of it."""
    if not task.cancelled():
        task.exception()
