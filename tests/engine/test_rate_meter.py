from cluster.engine.rate_meter import RateMeter


def test_nothing_measured_is_zero() -> None:
    assert RateMeter().tokens_per_s == 0.0


def test_a_small_step_hardly_moves_the_rate() -> None:
    meter = RateMeter()
    meter.add(512, 1.0)
    meter.add(2, 0.05)  # 40 tokens/s
    assert 400 < meter.tokens_per_s < 512


def test_a_first_small_step_is_soon_forgotten() -> None:
    meter = RateMeter()
    meter.add(2, 0.05)
    meter.add(512, 1.0)
    assert 480 < meter.tokens_per_s < 512
