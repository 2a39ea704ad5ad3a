//! The saved state of a scaler.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, ScalerError, ensure};
use crate::ffi::OverflowCounts;
use crate::scale::GradScalerConfig;
use crate::scale::config::{HostScale, clamp_tracker};

/// The state of a [`GradScaler`](crate::GradScaler). It is serialized under PyTorch's five keys `scale`,
/// `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`, all of which are required to load it.
///
/// Options that PyTorch lacks follow under keys of their own if they differ from their defaults; PyTorch ignores these
/// keys. The loading scaler keeps its own value of an absent option. The counts that such an option needs are saved
/// with it; without the option they begin anew in a resumed run. A disabled scaler has the empty state `{}`. Enable
/// serde_json's feature `float_roundtrip` if a scale that is not a power of two has to survive JSON to the last bit.
/// The JSON of a Python `scaler.state_dict()` loads here, and the other way round:
///
/// ```
/// use tch::Device;
/// use tch_amp::GradScaler;
/// use tch_amp::scaler::GradScalerState;
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
    /// Number of consecutive iterations without overflow.
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
    /// Number of consecutive iterations with overflow, saved only with
    /// [`max_consecutive_skips`](GradScalerConfig::max_consecutive_skips), which alone reads it.
    #[serde(rename = "_consecutive_skips", skip_serializing_if = "Option::is_none")]
    pub consecutive_skips: Option<u32>,
    /// Number of overflows until the hysteresis is used up. Saved, like the next two, only with a
    /// [`hysteresis`](GradScalerConfig::hysteresis) or a [`tolerance`](GradScalerConfig::tolerance).
    #[serde(rename = "_hysteresis_tracker", skip_serializing_if = "Option::is_none")]
    pub hysteresis_tracker: Option<i64>,
    /// Number of iterations since the scale last backed off or could grow.
    #[serde(rename = "_iterations_since_rescale", skip_serializing_if = "Option::is_none")]
    pub iterations_since_rescale: Option<i64>,
    /// Number of overflows among these iterations.
    #[serde(rename = "_overflows_since_rescale", skip_serializing_if = "Option::is_none")]
    pub overflows_since_rescale: Option<i64>,
}

/// The part of the state that changes from one iteration to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trackers {
    pub(crate) mirror: HostScale,
    pub(crate) skips: u32,
}

impl GradScalerState {
    pub(crate) fn save(config: &GradScalerConfig, trackers: Trackers) -> Self {
        // Destructured exhaustively, so that a new field does not compile until it is saved.
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
            // An option of the program, which a state does not change.
            warn_of_skips: _,
        } = *config;
        let Trackers { mirror: HostScale { scale, tracker, counts }, skips } = trackers;
        let OverflowCounts { hysteresis: left, iterations, overflows } = counts;
        let usual = GradScalerConfig::default();
        let counted = |count| config.tolerates_overflows().then_some(count);
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
            consecutive_skips: max_consecutive_skips.and(unless(skips, 0)),
            hysteresis_tracker: counted(left),
            iterations_since_rescale: counted(iterations),
            overflows_since_rescale: counted(overflows),
        }
    }

    /// The configuration and trackers of a scaler with `config` after loading this state.
    pub(crate) fn load(&self, config: &GradScalerConfig) -> Result<(GradScalerConfig, Trackers)> {
        if *self == Self::default() {
            return Err(Error::Scaler(ScalerError::EmptyState));
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
            warn_of_skips: config.warn_of_skips,
        };
        let scales = scale != 1.0 || !loaded.is_one();
        if config.is_one() == scales {
            return Err(Error::Scaler(ScalerError::OtherPrecision { scales }));
        }
        loaded.check_scale("scale", scale)?;
        loaded.check()?;
        let rule = "from 0 to 2^31 - 1";
        let tracker = i32::try_from(tracker)
            .ok()
            .filter(|tracker| *tracker >= 0)
            .ok_or(Error::out_of_range("_growth_tracker", tracker as f64, rule))?;
        let tracker = clamp_tracker(tracker, loaded.growth_interval);
        let mirror = HostScale { scale: scale as f32, tracker, counts: self.counts(&loaded)? };
        let limited = loaded.max_consecutive_skips.and(self.consecutive_skips);
        let trackers = Trackers { mirror, skips: limited.unwrap_or(0) };
        let config = GradScalerConfig { init_scale: config.init_scale, ..loaded };
        Ok((config, trackers))
    }

    /// The counts for a scaler with `config`: those of a new one if the state has none.
    fn counts(&self, config: &GradScalerConfig) -> Result<OverflowCounts> {
        let full = config.hysteresis.into();
        // JSON readers hold integers exactly up to 2^53.
        let (most, rule) = (1 << 53, "from 0 to 2^53");
        let left = self.hysteresis_tracker.unwrap_or(full);
        count("_hysteresis_tracker", left, u32::MAX.into(), "from 0 to 2^32 - 1")?;
        let iterations = self.iterations_since_rescale.unwrap_or(0);
        count("_iterations_since_rescale", iterations, most, rule)?;
        let overflows = self.overflows_since_rescale.unwrap_or(0);
        let rule = "from 0 to _iterations_since_rescale";
        count("_overflows_since_rescale", overflows, iterations, rule)?;
        // A count beyond a smaller hysteresis is the whole hysteresis.
        Ok(OverflowCounts { hysteresis: left.min(full), iterations, overflows })
    }
}

/// Refuses a value that no count can have reached.
fn count(key: &'static str, value: i64, most: i64, rule: &'static str) -> Result<()> {
    ensure(key, value as f64, (0..=most).contains(&value), rule)
}

pub(crate) fn required<T>(key: &'static str, value: Option<T>) -> Result<T> {
    value.ok_or(Error::Scaler(ScalerError::MissingKey { key }))
}

fn unless<T: PartialEq>(value: T, usual: T) -> Option<T> {
    (value != usual).then_some(value)
}
