//! Overflows that the scale tolerates, compared with plain loops that count as other systems do.

mod systems;

use rstest::rstest;
use tch::{Device, Tensor};
use tch_amp::GradScaler;
use tch_amp::scaler::GradScalerConfig;

use crate::scaler::{iterate, with_scale};
use systems::rule;
use testkit::rng::Rng;
use testkit::{assert_says, for_each_device};

#[rstest]
#[case("Megatron", false, 0.0)]
#[case("DeepSpeed", false, 0.0)]
#[case("DeepSpeed", true, 0.0)]
#[case("fairseq", true, 0.05)]
#[case("fairseq", true, 0.3)]
#[case("fairseq", true, 1.0)]
fn the_scale_changes_as_in_other_systems(
    #[case] system: &str,
    #[case] consecutive_hysteresis: bool,
    #[case] tolerance: f64,
) {
    for_each_device(|device| {
        let mut rng = Rng::new(11);
        let mut changes = 0;
        for program in 0..20 {
            let config = GradScalerConfig {
                growth_interval: 1 + rng.below(6) as i64,
                hysteresis: if tolerance > 0.0 { 1 } else { 1 + rng.below(4) as u32 },
                min_scale: 2.0,
                consecutive_hysteresis,
                tolerance,
                ..Default::default()
            };
            let mut wanted = rule(system, config);
            let mut scaler = config.build(device).unwrap();
            let often = 2 + rng.below(5);
            let mut before = config.init_scale;
            for step in 0..60 {
                let overflow = rng.one_in(often);
                iterate(&mut scaler, device, overflow).unwrap();
                let want = wanted(overflow);
                let got = scaler.get_scale().unwrap();
                assert_eq!(got, want, "{system}, program {program}, step {step}: {config:?}");
                let one = Tensor::from(1.0f32).to_device(device);
                assert_eq!(scaler.scale(&one).unwrap().double_value(&[]), got, "on the device");
                changes += i32::from(got < before);
                before = got;
            }
        }
        assert!(changes > 20, "the scale backed off only {changes} times");
    });
}

#[test]
fn a_tolerant_scaler_resumes_from_its_state() {
    for_each_device(|device| {
        let config = GradScalerConfig {
            hysteresis: 3,
            consecutive_hysteresis: false,
            tolerance: 0.2,
            growth_interval: 7,
            error_at_min_scale: true,
            ..Default::default()
        };
        let mut rng = Rng::new(3);
        let mut whole = config.build(device).unwrap();
        let mut parts = config.build(device).unwrap();
        for step in 0..200 {
            let overflow = rng.one_in(4);
            iterate(&mut whole, device, overflow).unwrap();
            iterate(&mut parts, device, overflow).unwrap();
            if rng.one_in(3) {
                let json = serde_json::to_string(&parts.state_dict().unwrap()).unwrap();
                parts = GradScaler::new(device).unwrap();
                parts.load_state_dict(&serde_json::from_str(&json).unwrap()).unwrap();
            }
            let states = [whole.state_dict(), parts.state_dict()].map(Result::unwrap);
            assert_eq!(states[0], states[1], "step {step}");
        }
    });
}

#[test]
fn a_state_without_counts_starts_with_the_whole_hysteresis() {
    let usual = GradScaler::new(Device::Cpu).unwrap().state_dict().unwrap();
    let config = GradScalerConfig { hysteresis: 2, ..with_scale(16.0) };
    let mut scaler = config.build(Device::Cpu).unwrap();
    iterate(&mut scaler, Device::Cpu, true).unwrap();
    scaler.load_state_dict(&usual).unwrap();
    iterate(&mut scaler, Device::Cpu, true).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 65536.0, "the first of two is tolerated");
    iterate(&mut scaler, Device::Cpu, true).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 32768.0);
}

#[rstest]
#[case("_hysteresis_tracker", -1)]
#[case("_iterations_since_rescale", -1)]
#[case("_overflows_since_rescale", 5)]
fn impossible_counts_are_refused(#[case] key: &str, #[case] value: i64) {
    let config = GradScalerConfig { hysteresis: 3, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let before = scaler.state_dict().unwrap();
    let mut json = serde_json::to_value(&before).unwrap();
    json[key] = value.into();
    let state = serde_json::from_value(json).unwrap();
    assert_says(scaler.load_state_dict(&state), key);
    assert_eq!(scaler.state_dict().unwrap(), before);
}
