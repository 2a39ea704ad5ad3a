//! What a scaler saves and loads.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, ensure};
use crate::scaler::patience::Patience;
use crate::scaler::scale::{Mirror, Prepared};
use crate::scaler::{GradScaler, GradScalerConfig};

/// The state of a [`GradScaler`](crate::GradScaler): serialised, PyTorch's five keys `scale`, `growth_factor`,
/// `backoff_factor`, `growth_interval` and `_growth_tracker`.
///
/// An option that is absent leaves the loading scaler's own as it is. The options that PyTorch lacks follow under keys
/// of their own where they differ from their defaults; PyTorch ignores them. A disabled scaler has the empty state
/// `{}`. Read JSON with serde_json's feature `float_roundtrip` where a scale that is no power of two must come back to
/// the last bit. The JSON of a Python `scaler.state_dict()` loads here, and the other way round:
///
/// ```
/// use tch::Device;
/// use tch_amp::{GradScaler, GradScalerState};
///
/// let saved = r#"{"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
///                 "growth_interval": 2000, "_growth_tracker": 7}"#;
/// let state: GradScalerState = serde_json::from_str(saved)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// scaler.load_state_dict(&state)?;
/// assert_eq!(scaler.get_scale()?, 1024.0);
/// assert_eq!(scaler.state_dict()?, state);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct GradScalerState {
    /// The scale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
    /// See [`GradScalerConfig::growth_factor`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth_factor: Option<f64>,
    /// See [`GradScalerConfig::backoff_factor`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff_factor: Option<f64>,
    /// See [`GradScalerConfig::growth_interval`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth_interval: Option<i64>,
    /// Iterations in a row without overflow.
    #[serde(rename = "_growth_tracker", skip_serializing_if = "Option::is_none")]
    pub growth_tracker: Option<i64>,
    /// See [`GradScalerConfig::min_scale`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_scale: Option<f64>,
    /// See [`GradScalerConfig::max_scale`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_scale: Option<f64>,
    /// See [`GradScalerConfig::hysteresis`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hysteresis: Option<u32>,
    /// See [`GradScalerConfig::consecutive_hysteresis`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consecutive_hysteresis: Option<bool>,
    /// See [`GradScalerConfig::tolerance`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<f64>,
    /// See [`GradScalerConfig::max_consecutive_skips`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_consecutive_skips: Option<u32>,
    /// See [`GradScalerConfig::error_at_min_scale`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_at_min_scale: Option<bool>,
    /// See [`GradScalerConfig::allow_fp16_gradients`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_fp16_gradients: Option<bool>,
    /// Iterations in a row with overflow.
    #[serde(rename = "_consecutive_skips", skip_serializing_if = "Option::is_none")]
    pub consecutive_skips: Option<u32>,
    /// Overflows until the hysteresis is used up.
    #[serde(rename = "_hysteresis_tracker", skip_serializing_if = "Option::is_none")]
    pub hysteresis_tracker: Option<i64>,
    /// Iterations since the scale last backed off or could grow.
    #[serde(rename = "_iterations_since_rescale", skip_serializing_if = "Option::is_none")]
    pub iterations_since_rescale: Option<i64>,
    /// Overflows among them.
    #[serde(rename = "_overflows_since_rescale", skip_serializing_if = "Option::is_none")]
    pub overflows_since_rescale: Option<i64>,
}

/// What changes from one iteration to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Progress {
    pub(crate) mirror: Mirror,
    pub(crate) skips: u32,
}

impl GradScalerState {
    pub(crate) fn save(config: &GradScalerConfig, progress: Progress) -> Self {
        // Whole, so that a new field does not compile until it is saved.
        let GradScalerConfig {
            init_scale: _,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled: _,
            min_scale,
            max_scale,
            hysteresis,
            consecutive_hysteresis,
            tolerance,
            max_consecutive_skips,
            error_at_min_scale,
            allow_fp16_gradients,
        } = *config;
        let Progress { mirror: Mirror { scale, tracker, patience }, skips } = progress;
        let Patience { hysteresis: left, iterations, overflows } = patience;
        let usual = GradScalerConfig::default();
        let patient = |count| config.is_patient().then_some(count);
        Self {
            scale: Some(scale.into()),
            growth_factor: Some(growth_factor),
            backoff_factor: Some(backoff_factor),
            growth_interval: Some(growth_interval),
            growth_tracker: Some(tracker.into()),
            min_scale: unless(min_scale, usual.min_scale),
            max_scale: unless(max_scale, usual.max_scale),
            hysteresis: unless(hysteresis, usual.hysteresis),
            consecutive_hysteresis: unless(consecutive_hysteresis, usual.consecutive_hysteresis),
            tolerance: unless(tolerance, usual.tolerance),
            max_consecutive_skips,
            error_at_min_scale: unless(error_at_min_scale, usual.error_at_min_scale),
            allow_fp16_gradients: unless(allow_fp16_gradients, usual.allow_fp16_gradients),
            consecutive_skips: unless(skips, 0),
            hysteresis_tracker: patient(left),
            iterations_since_rescale: patient(iterations),
            overflows_since_rescale: patient(overflows),
        }
    }

    /// The configuration and progress that this state asks of a scaler with `config`.
    pub(crate) fn load(&self, config: &GradScalerConfig) -> Result<(GradScalerConfig, Progress)> {
        if *self == Self::default() {
            return Err(Error::EmptyState);
        }
        let scale = required("scale", self.scale)?;
        let tracker = required("_growth_tracker", self.growth_tracker)?;
        let loaded = GradScalerConfig {
            init_scale: scale,
            growth_factor: required("growth_factor", self.growth_factor)?,
            backoff_factor: required("backoff_factor", self.backoff_factor)?,
            growth_interval: required("growth_interval", self.growth_interval)?,
            enabled: config.enabled,
            min_scale: self.min_scale.unwrap_or(config.min_scale),
            max_scale: self.max_scale.unwrap_or(config.max_scale),
            hysteresis: self.hysteresis.unwrap_or(config.hysteresis),
            consecutive_hysteresis: self
                .consecutive_hysteresis
                .unwrap_or(config.consecutive_hysteresis),
            tolerance: self.tolerance.unwrap_or(config.tolerance),
            max_consecutive_skips: self.max_consecutive_skips.or(config.max_consecutive_skips),
            error_at_min_scale: self.error_at_min_scale.unwrap_or(config.error_at_min_scale),
            allow_fp16_gradients: self.allow_fp16_gradients.unwrap_or(config.allow_fp16_gradients),
        };
        loaded.check_scale("scale", scale)?;
        loaded.check()?;
        let rule = "from 0 to 2^31 - 1";
        let tracker = i32::try_from(tracker)
            .ok()
            .filter(|tracker| *tracker >= 0)
            .ok_or(Error::InvalidValue { field: "_growth_tracker", value: tracker as f64, rule })?;
        let tracker = clamp_tracker(tracker, loaded.growth_interval);
        let mirror = Mirror { scale: scale as f32, tracker, patience: self.patience(&loaded)? };
        let progress = Progress { mirror, skips: self.consecutive_skips.unwrap_or(0) };
        let config = GradScalerConfig { init_scale: config.init_scale, ..loaded };
        Ok((config, progress))
    }

    /// The patience of a scaler with `config`: a full one where the state has none.
    fn patience(&self, config: &GradScalerConfig) -> Result<Patience> {
        let full = config.hysteresis.into();
        // JSON's numbers are exact up to there.
        let (most, rule) = (1 << 53, "from 0 to 2^53");
        let left = self.hysteresis_tracker.unwrap_or(full);
        count("_hysteresis_tracker", left, u32::MAX.into(), "from 0 to 2^32 - 1")?;
        let iterations = self.iterations_since_rescale.unwrap_or(0);
        count("_iterations_since_rescale", iterations, most, rule)?;
        let overflows = self.overflows_since_rescale.unwrap_or(0);
        let rule = "from 0 to _iterations_since_rescale";
        count("_overflows_since_rescale", overflows, iterations, rule)?;
        // More than a smaller hysteresis allows is all of it.
        Ok(Patience { hysteresis: left.min(full), iterations, overflows })
    }
}

/// Refuses what no count can have come to.
fn count(key: &'static str, value: i64, most: i64, rule: &'static str) -> Result<()> {
    ensure(key, value as f64, (0..=most).contains(&value), rule)
}

/// libtorch grows the scale when the tracker *equals* the interval. A tracker beyond it would never grow again, so it
/// is brought to the last place before.
pub(crate) fn clamp_tracker(tracker: i32, growth_interval: i64) -> i32 {
    i64::from(tracker).min(growth_interval - 1) as i32
}

pub(crate) fn required<T>(key: &'static str, value: Option<T>) -> Result<T> {
    value.ok_or(Error::MissingKey { key })
}

fn unless<T: PartialEq>(value: T, usual: T) -> Option<T> {
    (value != usual).then_some(value)
}

/// A state that a scaler can take over.
#[derive(Debug)]
pub(crate) struct LoadedState {
    scale: Prepared,
    config: GradScalerConfig,
    skips: u32,
}

impl GradScaler {
    /// Returns the state to save: the empty one for a disabled scaler. Waits as [`get_scale`](Self::get_scale).
    ///
    /// # Errors
    ///
    /// [`Error::IterationOpen`] between `unscale_` or `step` and `update`, where a part of the state is in the
    /// gradients.
    pub fn state_dict(&self) -> Result<GradScalerState> {
        let Some(scale) = &self.scale else {
            return Ok(GradScalerState::default());
        };
        self.check_closed("state_dict")?;
        let progress = Progress { mirror: scale.value()?, skips: self.skips };
        Ok(GradScalerState::save(&self.config, progress))
    }

    /// Takes over a saved state. Nothing happens to a disabled scaler.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyState`], [`Error::MissingKey`] and [`Error::InvalidValue`] for a state that no scaler can have
    /// saved, and [`Error::IterationOpen`]; nothing changes then.
    pub fn load_state_dict(&mut self, state: &GradScalerState) -> Result<()> {
        match self.prepare_state(state)? {
            Some(loaded) => self.set_state(loaded),
            None => Ok(()),
        }
    }

    /// Checks a state and makes what loading it takes; `None` for a disabled scaler, which loads nothing.
    pub(crate) fn prepare_state(&self, state: &GradScalerState) -> Result<Option<LoadedState>> {
        let Some(scale) = &self.scale else {
            return Ok(None);
        };
        self.check_closed("load_state_dict")?;
        let (config, Progress { mirror, skips }) = state.load(&self.config)?;
        Ok(Some(LoadedState { scale: scale.prepare(mirror, &config)?, config, skips }))
    }

    pub(crate) fn set_state(&mut self, loaded: LoadedState) -> Result<()> {
        if let Some(scale) = &mut self.scale {
            scale.set(loaded.scale)?;
        }
        (self.config, self.skips) = (loaded.config, loaded.skips);
        Ok(())
    }

    fn check_closed(&self, call: &'static str) -> Result<()> {
        if self.iteration.borrow().is_open() { Err(Error::IterationOpen { call }) } else { Ok(()) }
    }
}
