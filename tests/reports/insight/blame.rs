//! Which parts an audit blames, and which it does not.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::insight::audit;

use crate::insight::audit::{Suspected, audited, suspected};
use crate::insight::{alone, region};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn only_the_part_that_is_not_finite_is_blamed() {
    let audit = audited(Kind::BFloat16, 1.0, |x| {
        let added = if x.kind() == Kind::BFloat16 { f64::INFINITY } else { 0.0 };
        (x + added) * 2.0
    });
    assert_eq!(audit.needs_f32(), ["planted"]);
    assert_eq!(audit.suspicious(), ["planted"], "{audit}");
}

#[test]
fn a_part_whose_results_underflow_is_blamed_and_not_the_one_before() {
    let audit = audited(Kind::Half, 1.0, |x| x * 1e-9);
    assert_eq!(audit.needs_f32(), ["planted"], "{audit}");
}

#[test]
fn a_difference_that_is_zero_in_f32_is_not_judged() {
    let weight = Tensor::randn([32, 32], F32);
    let off = region(Kind::BFloat16).enabled(false);
    let audit = audited(Kind::BFloat16, 1.0, |x| {
        let exact = off.run(|| x.to_kind(Kind::Float).matmul(&weight)).unwrap();
        x + (x.matmul(&weight) - exact)
    });
    let infinite = |part: &Suspected| part.suspicions.contains(&"NotFinite".to_owned());
    assert!(!suspected(&audit).iter().any(infinite), "{audit}");
}

#[test]
fn what_draws_or_casts_is_not_blamed() {
    let harmless: [fn(&Tensor) -> Tensor; 3] = [
        |x| x + x.randn_like() * 0.1,
        |x| x.dropout(0.5, true).to_kind(Kind::Float).dropout(0.5, true),
        |x| x * Tensor::ones([16, 32], F32).type_as(x),
    ];
    for planted in harmless {
        let audit = audited(Kind::BFloat16, 1.0, planted);
        assert!(audit.suspicious().is_empty(), "{audit}");
    }
}

#[test]
fn parameters_at_the_root_have_their_names() {
    let _alone = alone();
    tch::manual_seed(3);
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().randn("weight", &[32, 32], 0.0, 1.0);
    let x = Tensor::randn([16, 32], F32);
    let audit = audit(&vs, &region(Kind::BFloat16), &GradScaler::disabled(), |region| {
        region.run(|| x.matmul(&weight).square().mean(Kind::Float))
    })
    .unwrap();
    let parts = suspected(&audit);
    assert_eq!(parts.iter().filter(|part| part.path == "weight").count(), 1, "{audit}");
    assert!(parts.iter().all(|part| !part.path.is_empty()));
}
