//! Which parts an audit blames, and which it does not.

use serde::Deserialize;
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Audit, audit, named};
use tch_amp::{Autocast, GradScaler, Result};

use crate::insight::alone;
use testkit::rows::rows;

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[derive(Deserialize)]
struct Part {
    path: String,
    suspicions: Vec<String>,
}

fn parts(audit: &Audit) -> Vec<Part> {
    rows(audit, "parts")
}

/// Audits two linear layers and what is planted between them.
fn audited(kind: Kind, planted: impl Fn(&Tensor, &Autocast) -> Tensor) -> Result<Audit> {
    let _alone = alone();
    tch::manual_seed(3);
    let vs = VarStore::new(Device::Cpu);
    let first = nn::linear(vs.root() / "first", 32, 32, Default::default());
    let last = nn::linear(vs.root() / "last", 32, 32, Default::default());
    let x = Tensor::randn([16, 32], F32);
    let region = Autocast::new(Device::Cpu).dtype(kind);
    audit(&vs, &region, &GradScaler::disabled(), |region| {
        region.run(|| {
            let hidden = named("planted", || planted(&x.apply(&first), &region));
            hidden.apply(&last).to_kind(Kind::Float).square().mean(None)
        })
    })
}

#[test]
fn only_the_part_that_is_not_finite_is_blamed() {
    let infinity = |x: &Tensor, _: &Autocast| {
        let added = if x.kind() == Kind::BFloat16 { f64::INFINITY } else { 0.0 };
        (x + added) * 2.0
    };
    let audit = audited(Kind::BFloat16, infinity).unwrap();
    assert_eq!(audit.needs_f32(), ["planted"]);
    assert_eq!(audit.suspicious(), ["planted"], "{audit}");
}

#[test]
fn a_part_whose_results_underflow_is_blamed_and_not_the_one_before() {
    let audit = audited(Kind::Half, |x, _| x * 1e-9).unwrap();
    assert_eq!(audit.needs_f32(), ["planted"], "{audit}");
}

#[test]
fn a_difference_that_is_zero_in_f32_is_not_judged() {
    let weight = Tensor::randn([32, 32], F32);
    let audit = audited(Kind::BFloat16, |x, region| {
        let off = region.enabled(false);
        let exact = off.run(|| x.to_kind(Kind::Float).matmul(&weight)).unwrap();
        x + (x.matmul(&weight) - exact)
    })
    .unwrap();
    let infinite = |part: &&Part| part.suspicions.contains(&"NotFinite".to_owned());
    assert_eq!(parts(&audit).iter().filter(infinite).count(), 0, "{audit}");
}

#[test]
fn what_draws_or_casts_is_not_blamed() {
    let noise = |x: &Tensor, _: &Autocast| x + x.randn_like() * 0.1;
    let dropout =
        |x: &Tensor, _: &Autocast| x.dropout(0.5, true).to_kind(Kind::Float).dropout(0.5, true);
    let type_as = |x: &Tensor, _: &Autocast| x * Tensor::ones([16, 32], F32).type_as(x);
    let audits = [
        audited(Kind::BFloat16, noise),
        audited(Kind::BFloat16, dropout),
        audited(Kind::BFloat16, type_as),
    ];
    for audit in audits.map(Result::unwrap) {
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
    let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let audit = audit(&vs, &region, &GradScaler::disabled(), |region| {
        region.run(|| x.matmul(&weight).square().mean(Kind::Float))
    })
    .unwrap();
    let parts = parts(&audit);
    assert_eq!(parts.iter().filter(|part| part.path == "weight").count(), 1, "{audit}");
    assert!(parts.iter().all(|part| !part.path.is_empty()));
}
