//! How an iteration changes the scale in other systems, as plain loops.

use tch_amp::scaler::GradScalerConfig;

/// The rule by which another system changes the scale after an iteration.
pub trait Reference {
    fn update(&mut self, overflow: bool) -> f64;
}

/// Megatron-LM: only growth restores the hysteresis.
struct Megatron {
    config: GradScalerConfig,
    scale: f64,
    good: i64,
    left: i64,
}

impl Reference for Megatron {
    fn update(&mut self, overflow: bool) -> f64 {
        if overflow {
            self.good = 0;
            self.left -= 1;
            if self.left <= 0 {
                self.scale = (self.scale * self.config.backoff_factor).max(self.config.min_scale);
            }
            return self.scale;
        }
        self.good += 1;
        if self.good == self.config.growth_interval {
            (self.good, self.left) = (0, self.config.hysteresis.into());
            self.scale *= self.config.growth_factor;
        }
        self.scale
    }
}

/// DeepSpeed: the hysteresis stays at one once it is exhausted, and the interval is counted from the last overflow.
struct DeepSpeed {
    config: GradScalerConfig,
    scale: f64,
    left: u32,
    iteration: i64,
    last_overflow: i64,
}

impl Reference for DeepSpeed {
    fn update(&mut self, overflow: bool) -> f64 {
        let config = &self.config;
        if overflow {
            if self.left == 1 {
                self.scale = (self.scale * config.backoff_factor).max(config.min_scale);
            } else {
                self.left -= 1;
            }
            self.last_overflow = self.iteration;
        } else {
            let grows = (self.iteration - self.last_overflow) % config.growth_interval == 0;
            if config.consecutive_hysteresis || grows {
                self.left = config.hysteresis;
            }
            if grows {
                self.scale *= config.growth_factor;
            }
        }
        self.iteration += 1;
        self.scale
    }
}

/// fairseq, except that a growth resets the count of earlier overflows.
struct Fairseq {
    config: GradScalerConfig,
    scale: f64,
    iteration: i64,
    last_overflow: i64,
    last_rescale: i64,
    overflows: i64,
}

impl Reference for Fairseq {
    fn update(&mut self, overflow: bool) -> f64 {
        let config = &self.config;
        if overflow {
            self.last_overflow = self.iteration;
            self.overflows += 1;
            let share = self.overflows as f64 / (self.iteration - self.last_rescale) as f64;
            if share >= config.tolerance {
                self.scale = (self.scale * config.backoff_factor).max(config.min_scale);
                (self.last_rescale, self.overflows) = (self.iteration, 0);
            }
        } else if (self.iteration - self.last_overflow) % config.growth_interval == 0 {
            self.scale *= config.growth_factor;
            (self.last_rescale, self.overflows) = (self.iteration, 0);
        }
        self.iteration += 1;
        self.scale
    }
}

pub fn reference(system: &str, config: GradScalerConfig) -> Box<dyn Reference> {
    let scale = config.init_scale;
    match system {
        "Megatron" => Box::new(Megatron { config, scale, good: 0, left: config.hysteresis.into() }),
        "DeepSpeed" => {
            let left = config.hysteresis;
            Box::new(DeepSpeed { config, scale, left, iteration: 0, last_overflow: -1 })
        }
        "fairseq" => {
            let (last_overflow, last_rescale) = (-1, -1);
            let (iteration, overflows) = (0, 0);
            Box::new(Fairseq { config, scale, iteration, last_overflow, last_rescale, overflows })
        }
        other => panic!("{other} is not one of the systems"),
    }
}
