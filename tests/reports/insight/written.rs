//! Explanations and audits as JSON.

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Audit, Explanation, audit};
use tch_amp::{Autocast, GradScaler};

use crate::insight::{alone, explain_planted};
use testkit::rows::rows;

#[test]
fn an_explanation_with_infinities_survives_json() {
    let planted = |x: &Tensor| (x * 0.0).to_kind(Kind::Half).reciprocal().to_kind(Kind::Float);
    let explanation = explain_planted(planted);
    assert_eq!(explanation.culprit.as_ref().unwrap().largest_in_f32, Some(f64::INFINITY));
    let text = serde_json::to_string(&explanation).unwrap();
    assert_eq!(serde_json::from_str::<Explanation>(&text).unwrap(), explanation);
}

#[test]
fn an_audit_with_infinities_survives_json() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
    let x = Tensor::randn([2, 4], (Kind::Float, Device::Cpu));
    let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let audit = audit(&vs, &region, &GradScaler::disabled(), |region| {
        region.run(|| {
            let y = x.apply(&layer);
            let added = if y.kind() == Kind::BFloat16 { f64::INFINITY } else { 0.0 };
            (y + added).square().mean(Kind::Float)
        })
    })
    .unwrap();
    let parts = rows::<serde_json::Value>(&audit, "parts");
    assert!(parts.iter().any(|part| part["output"]["error"] == "inf"));
    let text = serde_json::to_string(&audit).unwrap();
    let read: Audit = serde_json::from_str(&text).unwrap();
    // NaN is not equal to itself.
    assert_eq!(format!("{read:?}"), format!("{audit:?}"));
}
