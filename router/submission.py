"""What a job asks of the cluster: every answer submitted, sampled or searched for. If one is refused, none
runs on.

Several answers to a long prompt wait until it is computed once (`router.forks`); a beam search is one request
at first and forks by itself (`router.beam_run`).
"""

from __future__ import annotations

from cluster.ids import RequestId
from cluster.request import RequestSpec
from cluster.sampling import PromptScore, SamplingParams, TokenOutput
from router.api_keys import ApiKey
from router.beam_run import BeamRun
from router.beam_search import Hypothesis
from router.delivery import RequestStream
from router.forks import FollowingStream, SharedPrompt
from router.gateway import Gateway
from router.generation import Answering, Generation
from router.job import Job
from router.output import ChoiceOutput
from router.reply import Choice, ChoicePlan
from router.sampling_seeds import seed_of_choice


def submit(
    gateway: Gateway, job: Job, reply_id: str, arrived_s: float, key: ApiKey | None
) -> list[Answering]:
    """In the order of prompts, then of answers.

    Raises:
        BatonError: one was not accepted; those that were are ended.
    """
    answers: list[Answering] = []
    submission = _Submission(gateway, job, reply_id, arrived_s, key)
    try:
        for prompt in range(len(job.prompts)):
            if job.beams:
                answers.append(submission.search(prompt))
            else:
                submission.sample(prompt, answers)
    except Exception as error:
        for answer in answers:
            answer.end(error)
            answer.close()
        raise
    return answers


class _Submission:
    """Of one job."""

    def __init__(
        self, gateway: Gateway, job: Job, reply_id: str, arrived_s: float, key: ApiKey | None
    ) -> None:
        self._gateway = gateway
        self._job = job
        self._reply_id = reply_id
        self._arrived_s = arrived_s
        self._key = key

    def sample(self, prompt: int, answers: list[Answering]) -> None:
        """All answers to one prompt; they are appended to `answers`, each when it is accepted."""
        gateway, job = self._gateway, self._job
        prompt_ids, sampling = job.prompts[prompt], job.sampling[prompt]
        shared = SharedPrompt()
        wait = len(prompt_ids) >= gateway.limits.fork_min_tokens or sampling.prompt_logprobs is not None
        for candidate in range(job.num_candidates):
            index = len(answers)
            leads = candidate == 0
            is_alone = len(job.prompts) * job.num_candidates == 1
            name = self._reply_id if is_alone else f"{self._reply_id}-{index}"
            spec = self._spec(name, prompt_ids, seed_of_choice(sampling, candidate))
            stream: RequestStream
            if leads or not wait:
                stream = gateway.intake.submit(spec)
            else:
                stream = FollowingStream(gateway.intake, spec, shared)
            keep_entries = job.reply.keep_entries or job.num_candidates > job.num_choices
            answers.append(
                Generation(
                    stream,
                    ChoiceOutput(gateway.tokenizer, job.text, keep_entries=keep_entries),
                    ChoicePlan(index, prompt_ids, job.leads[prompt]),
                    shared,
                    leads=leads,
                    arrived_s=self._arrived_s,
                    clock=gateway.clock,
                    metrics=gateway.metrics,
                )
            )

    def search(self, prompt: int) -> BeamRun:
        """For the best answers to one prompt."""
        gateway, job = self._gateway, self._job
        prompt_ids, num_shown = job.prompts[prompt], job.reply.num_logprobs or 0

        def show(place: int, hypothesis: Hypothesis, scores: tuple[PromptScore, ...]) -> Choice:
            plan = ChoicePlan(prompt * job.num_choices + place, prompt_ids, job.leads[prompt])
            text = ChoiceOutput(gateway.tokenizer, job.text, keep_entries=job.reply.keep_entries)
            outputs = [
                TokenOutput(output.token_id, output.logprob, output.top_logprobs[:num_shown])
                for output in hypothesis.outputs
            ]
            return Choice(plan, text.push(outputs, hypothesis.reason), scores)

        return BeamRun(
            gateway.intake,
            self._spec(f"{self._reply_id}-{prompt}", prompt_ids, job.sampling[prompt]),
            job.beams[prompt],
            show,
            arrived_s=self._arrived_s,
            clock=gateway.clock,
            metrics=gateway.metrics,
        )

    def _spec(self, name: str, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> RequestSpec:
        job, key = self._job, self._key
        return RequestSpec(
            request=RequestId(name),
            token_ids=prompt_ids,
            sampling=sampling,
            cache_salt=job.cache_salt,
            deadline_s=self._gateway.limits.request_deadline_s,
            priority=job.priority,
            tenant="" if key is None else key.tenant,
            share=1.0 if key is None else key.limits.share,
            affinity=job.affinity,
            slo=job.slo,
        )
