"""What all endpoints of one gateway share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cluster.clock import Clock
from cluster.errors import InvalidRequest, ModelNotFound
from cluster.metrics import Metrics
from cluster.tokenizer import Tokenizer
from router.aside import Aside
from router.bodies import Bodies
from router.delivery import ClusterStatus, RequestIntake
from router.fields import IgnoredFields
from router.generation import InFlight
from router.job import JobBuilder
from router.limits import GatewayLimits
from router.model_info import ModelInfo
from router.openai_errors import PublicError, public_error
from router.quotas.gate import QuotaGate
from router.tool_formats import ToolFormat
from router.vocabulary import GrammarsAhead

REQUEST_ID = "baton.request_id"  # key of the scope: the client's label, or one of ours


@dataclass(frozen=True, slots=True)
class Gateway:
    """Frozen; what changes is in what it holds."""

    intake: RequestIntake
    status: ClusterStatus
    tokenizer: Tokenizer
    model: ModelInfo
    metrics: Metrics
    clock: Clock
    limits: GatewayLimits
    in_flight: InFlight
    quotas: QuotaGate
    grammars: GrammarsAhead
    tool_format: ToolFormat
    bodies: Bodies
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    aside: Aside = field(default_factory=Aside)

    def job_builder(self) -> JobBuilder:
        here = self.status.max_model_len()
        limit = self.model.max_model_len
        return JobBuilder(
            self.tokenizer,
            self.model,
            limit if here is None else min(limit, here),
            self.limits.request,
            self.grammars,
            self.tool_format,
        )

    def check_model(self, name: Any) -> None:
        """Raises `ModelNotFound`, or `InvalidRequest` for a name that is not a string."""
        if name is None or name == self.model.name:
            return
        if not isinstance(name, str):
            raise InvalidRequest("`model` must be a string.", param="model")
        raise ModelNotFound(f"The model `{name[:100]}` is not served here; `{self.model.name}` is.")

    def public_error(self, error: BaseException, request_id: str) -> PublicError:
        """The client's view, with the status that this operator wants for overload."""
        public = public_error(error, request_id)
        return replace(public, status=self.limits.overload_status) if public.code == "overloaded" else public
