//! How an iteration changes the scale in other systems, as plain loops.

use tch_amp::scaler::GradScalerConfig;

/// The rule of another system: takes whether an iteration has overflowed, and returns the scale after it.
pub type Rule = Box<dyn FnMut(bool) -> f64>;

/// Only growth restores the hysteresis.
fn megatron(config: GradScalerConfig) -> Rule {
    let (mut scale, mut good, mut left) = (config.init_scale, 0, i64::from(config.hysteresis));
    Box::new(move |overflow| {
        if overflow {
            good = 0;
            left -= 1;
            if left <= 0 {
                scale = (scale * config.backoff_factor).max(config.min_scale);
            }
            return scale;
        }
        good += 1;
        if good == config.growth_interval {
            (good, left) = (0, config.hysteresis.into());
            scale *= config.growth_factor;
        }
        scale
    })
}

/// The hysteresis stays at one once it is exhausted, and the interval is counted from the last overflow.
fn deepspeed(config: GradScalerConfig) -> Rule {
    let (mut scale, mut left) = (config.init_scale, config.hysteresis);
    let (mut iteration, mut last_overflow) = (0, -1);
    Box::new(move |overflow| {
        if overflow {
            if left == 1 {
                scale = (scale * config.backoff_factor).max(config.min_scale);
            } else {
                left -= 1;
            }
            last_overflow = iteration;
        } else {
            let grows = (iteration - last_overflow) % config.growth_interval == 0;
            if config.consecutive_hysteresis || grows {
                left = config.hysteresis;
            }
            if grows {
                scale *= config.growth_factor;
            }
        }
        iteration += 1;
        scale
    })
}

/// As fairseq, except that a growth resets the count of earlier overflows.
fn fairseq(config: GradScalerConfig) -> Rule {
    let (mut scale, mut iteration, mut overflows) = (config.init_scale, 0, 0);
    let (mut last_overflow, mut last_rescale) = (-1, -1);
    Box::new(move |overflow| {
        if overflow {
            last_overflow = iteration;
            overflows += 1;
            let share = f64::from(overflows) / (iteration - last_rescale) as f64;
            if share >= config.tolerance {
                scale = (scale * config.backoff_factor).max(config.min_scale);
                (last_rescale, overflows) = (iteration, 0);
            }
        } else if (iteration - last_overflow) % config.growth_interval == 0 {
            scale *= config.growth_factor;
            (last_rescale, overflows) = (iteration, 0);
        }
        iteration += 1;
        scale
    })
}

pub fn rule(system: &str, config: GradScalerConfig) -> Rule {
    match system {
        "Megatron" => megatron(config),
        "DeepSpeed" => deepspeed(config),
        "fairseq" => fairseq(config),
        other => panic!("{other} is not one of the systems"),
    }
}
