//! Audits: parts that are planted to lose precision are found, and healthy models are clean.

use std::collections::BTreeMap;

use serde::Deserialize;
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Audit, Dtype, audit, named};
use tch_amp::{Autocast, Error, GradScaler};

use crate::insight::{alone, region, scaler};
use testkit::rows::rows;
use testkit::tensors::{TIES, tied};

/// A part of an audit whose numbers are finite.
#[derive(Deserialize)]
struct Part {
    path: String,
    dtypes: BTreeMap<Dtype, usize>,
    output: Option<Output>,
    gradient: Option<Gradient>,
    seconds: [f64; 2],
}

#[derive(Deserialize)]
struct Output {
    error: f64,
    noise: Option<f64>,
    multiple: f64,
}

#[derive(Debug, Deserialize)]
struct Gradient {
    error: f64,
    cosine: f64,
    underflow: f64,
    underflow_unscaled: f64,
}

fn parts(audit: &Audit) -> Vec<Part> {
    rows(audit, "parts")
}

/// Audits two linear layers of 32, with what is planted between them.
pub(crate) fn audited(kind: Kind, scale: f64, planted: impl Fn(&Tensor) -> Tensor) -> Audit {
    let _alone = alone();
    tch::manual_seed(3);
    let vs = VarStore::new(Device::Cpu);
    let first = nn::linear(vs.root() / "first", 32, 32, Default::default());
    let last = nn::linear(vs.root() / "last", 32, 32, Default::default());
    let x = Tensor::randn([16, 32], (Kind::Float, Device::Cpu));
    let loss = |region: Autocast| {
        region.run(|| {
            let hidden = named("planted", || planted(&x.apply(&first)));
            hidden.apply(&last).to_kind(Kind::Float).square().mean(None)
        })
    };
    audit(&vs, &region(kind), &scaler(scale), loss).unwrap()
}

/// A part of an audit whose numbers may be infinite.
#[derive(Deserialize)]
pub(crate) struct Suspected {
    pub(crate) path: String,
    pub(crate) suspicions: Vec<String>,
}

pub(crate) fn suspected(audit: &Audit) -> Vec<Suspected> {
    rows(audit, "parts")
}

fn suspicions(audit: &Audit, path: &str) -> Vec<String> {
    suspected(audit).into_iter().find(|part| part.path == path).unwrap().suspicions
}

#[test]
fn f32_beside_f32_is_exactly_zero() {
    let audit = audited(Kind::Float, 65536.0, |x| x.softmax(-1, None).dropout(0.5, true));
    assert!(audit.suspicious().is_empty(), "{audit}");
    assert_eq!(audit.losses[0], audit.losses[1]);
    assert_eq!(audit.dtype, "fp32");
    let parts = parts(&audit);
    assert_eq!(parts.len(), 4, "{audit}");
    for part in &parts {
        if let Some(output) = &part.output {
            assert_eq!((output.error, output.multiple), (0.0, 0.0), "{audit}");
        }
        if let Some(gradient) = &part.gradient {
            assert_eq!((gradient.error, gradient.underflow), (0.0, 0.0), "{audit}");
            assert!((gradient.cosine - 1.0).abs() < 1e-12, "{audit}");
        }
    }
}

#[test]
fn healthy_models_are_clean() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let audit = audited(kind, 65536.0, |x| x.gelu("none").dropout(0.1, true));
        assert!(audit.suspicious().is_empty(), "{audit}");
        assert!(audit.losses[0] != audit.losses[1], "{audit}");
        let parts = parts(&audit);
        let first = parts[0].output.as_ref().unwrap();
        assert!(first.error > 1e-4 && first.multiple < 2.0 && first.multiple > 0.1, "{audit}");
        assert!(audit.to_string().contains("no part is suspicious in"), "{audit}");
    }
}

#[test]
fn results_in_half_precision_have_less_than_their_noise() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let audit = audited(kind, 1.0, Tensor::tanh);
        let dtype = Dtype::from(kind);
        let mut seen = 0;
        for part in parts(&audit).iter().filter(|part| part.dtypes.contains_key(&dtype)) {
            let output = part.output.as_ref().unwrap();
            let of_noise = output.error / output.noise.unwrap();
            assert!((0.1..2.0).contains(&of_noise), "{}: {audit}", part.path);
            seen += 1;
        }
        assert!(seen >= 3, "{audit}");
        assert!(audit.to_string().contains("× noise"), "{audit}");
    }
}

/// Convolutions with batch norms, and the blocks of a transformer with attention and layer norms, 8 deep.
#[test]
fn deeper_models_are_clean() {
    let _alone = alone();
    tch::manual_seed(4);
    let region = region(Kind::BFloat16);
    let scaler = GradScaler::disabled();
    let vs = VarStore::new(Device::Cpu);
    let mut net = nn::seq_t();
    for i in 0..4 {
        let path = vs.root() / i;
        let config = nn::ConvConfig { padding: 1, ..Default::default() };
        net = net.add(nn::conv2d(&path / "conv", if i == 0 { 1 } else { 8 }, 8, 3, config));
        net = net.add(nn::batch_norm2d(&path / "norm", 8, Default::default()));
        net = net.add_fn(Tensor::relu);
    }
    let images = Tensor::randn([4, 1, 8, 8], (Kind::Float, Device::Cpu));
    let before = vs.variables()["0.norm.running_mean"].copy();
    let loss = |region: Autocast| region.run(|| net.forward_t(&images, true).mean(Kind::Float));
    let convolutions = audit(&vs, &region, &scaler, loss).unwrap();
    assert!(convolutions.suspicious().is_empty(), "{convolutions}");
    assert_eq!(before, vs.variables()["0.norm.running_mean"]);

    let vs = VarStore::new(Device::Cpu);
    let blocks: Vec<_> = (0..8).map(|i| block(&(vs.root() / i))).collect();
    let x = Tensor::randn([2, 16, 32], (Kind::Float, Device::Cpu));
    let loss = |region: Autocast| {
        region
            .run(|| blocks.iter().fold(x.shallow_clone(), |x, f| f(&x)).square().mean(Kind::Float))
    };
    let transformer = audit(&vs, &region, &scaler, loss).unwrap();
    assert!(transformer.suspicious().is_empty(), "{transformer}");
}

fn block(path: &nn::Path<'_>) -> impl Fn(&Tensor) -> Tensor + use<> {
    let norm = nn::layer_norm(path / "norm", vec![32], Default::default());
    let qkv = nn::linear(path / "qkv", 32, 96, Default::default());
    let out = nn::linear(path / "out", 32, 32, Default::default());
    move |x| {
        let qkv = x.apply(&norm).apply(&qkv).chunk(3, -1);
        let scores = qkv[0].matmul(&qkv[1].transpose(1, 2)) / 32f64.sqrt();
        x + scores.softmax(-1, None).matmul(&qkv[2]).apply(&out)
    }
}

/// A sum of both signs is near zero by chance, which is nobody's fault.
#[test]
fn a_loss_near_zero_is_not_suspicious() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().ones("w", &[8]);
    let x = Tensor::from_slice(&[1.0f32, -1.001, 2.0, -2.003, 3.0, -3.001, 0.7, -0.6949]);
    let region = region(Kind::BFloat16);
    let loss = |region: Autocast| {
        region.run(|| (&weight * &x).unsqueeze(0).mm(&x.ones_like().unsqueeze(1)).sum(None))
    };
    let audit = audit(&vs, &region, &GradScaler::disabled(), loss).unwrap();
    assert!(audit.losses[0] != audit.losses[1], "{audit}");
    assert!(audit.suspicious().is_empty(), "{audit}");
}

#[test]
fn a_norm_of_numbers_with_a_large_mean_is_found() {
    let audit = audited(Kind::BFloat16, 1.0, |x| {
        let x = x + 1000.0;
        x.layer_norm([32], None::<&Tensor>, None::<&Tensor>, 1e-5, false)
    });
    assert_eq!(suspicions(&audit, "planted"), ["MagnifiesRounding"], "{audit}");
    assert_eq!(audit.suspicious().len(), 1, "{audit}");
    assert!(audit.needs_f32().contains(&"planted".to_owned()), "{audit}");
}

#[test]
fn a_softmax_over_large_logits_is_found() {
    let audit = audited(Kind::BFloat16, 1.0, |x| (x * 2000.0).softmax(-1, None));
    assert_eq!(suspicions(&audit, "planted")[0], "MagnifiesRounding", "{audit}");
    assert!(suspicions(&audit, "first").iter().all(|s| s == "Gradient"), "{audit}");
}

#[test]
fn a_long_sum_is_found() {
    let audit = audited(Kind::BFloat16, 1.0, |x| {
        let one = x.abs() + 1;
        (0..1000).fold(one.shallow_clone(), |sum, _| sum + &one) / 1000
    });
    assert!(!suspicions(&audit, "planted").is_empty(), "{audit}");
    assert_eq!(audit.suspicious()[0], "planted", "{audit}");
}

#[test]
fn the_logarithm_of_numbers_that_fp16_rounds_to_zero_is_found() {
    let audit = audited(Kind::Half, 1.0, |x| (x.square() * 1e-9 + 1e-9).log());
    assert_eq!(suspicions(&audit, "planted")[0], "NotFinite", "{audit}");
    assert_eq!(audit.suspicious()[0], "planted", "{audit}");
}

#[test]
fn gradients_that_become_zero_are_counted_at_both_scales() {
    // Gradients of about 1e-8, of which fp16 rounds many to zero without a scale.
    let planted = |x: &Tensor| x.tanh() * 1e-3;
    let unscaled = audited(Kind::Half, 1.0, planted);
    let scaled = audited(Kind::Half, 65536.0, planted);
    let gradient = |audit: &Audit| parts(audit).remove(0).gradient.unwrap();
    let (unscaled, scaled) = (gradient(&unscaled), gradient(&scaled));
    assert!(unscaled.underflow > 0.05, "{unscaled:?}");
    assert_eq!(unscaled.underflow, unscaled.underflow_unscaled);
    assert_eq!(scaled.underflow, 0.0, "{scaled:?}");
    assert_eq!(scaled.underflow_unscaled, unscaled.underflow);
}

/// As behind a ReLU whose units are dead.
#[test]
fn gradients_that_are_zero_in_f32_as_well_do_not_underflow() {
    let half_of_the_features = Tensor::from_slice(&[0f32, 1.0]).repeat([16]);
    for kind in [Kind::Half, Kind::BFloat16] {
        let audit = audited(kind, 65536.0, |x| x * half_of_the_features.to_kind(x.kind()));
        let parts = parts(&audit);
        let gradients = parts.iter().filter_map(|part| part.gradient.as_ref());
        assert_eq!(gradients.clone().count(), 2, "{audit}");
        for gradient in gradients {
            assert_eq!((gradient.underflow, gradient.underflow_unscaled), (0.0, 0.0), "{audit}");
        }
        assert!(audit.suspicious().is_empty(), "{audit}");
    }
}

/// Gradients that fp16 rounds to zero are suspicious there. bf16 has the exponents of f32, so that the same gradients
/// do not vanish; what vanishes in it does in f32, too.
#[test]
fn underflow_is_suspicious_in_fp16_only() {
    let planted = |x: &Tensor| x.tanh() * 1e-4;
    let [fp16, bf16] = [Kind::Half, Kind::BFloat16].map(|kind| audited(kind, 1.0, planted));
    let found = |audit: &Audit| suspicions(audit, "first").contains(&"Underflow".to_owned());
    assert!(found(&fp16) && fp16.to_string().contains("use a larger scale or bf16"), "{fp16}");
    assert!(!found(&bf16), "{bf16}");

    // A gradient that is exactly zero in bf16, because the results cancel only there.
    let cancelled = |x: &Tensor| {
        let near = x.detach() * 1e-5 + 1;
        x * (near.shallow_clone() - near.ones_like())
    };
    let bf16 = audited(Kind::BFloat16, 1.0, |x| cancelled(&x.to_kind(x.kind())));
    let gradient = parts(&bf16).remove(0).gradient.unwrap();
    assert!(gradient.underflow > 0.01, "{bf16}");
    assert!(!found(&bf16), "{bf16}");
}

/// The time of a part in f32 is that of its operators, forward and backward.
#[test]
fn the_time_of_what_should_stay_in_f32_is_measured() {
    let audit = audited(Kind::BFloat16, 1.0, |x| {
        let x = x + 1000.0;
        x.layer_norm([32], None::<&Tensor>, None::<&Tensor>, 1e-5, false)
    });
    let parts = parts(&audit);
    for place in 0..2 {
        assert!(parts.iter().all(|part| part.seconds[place] > 0.0), "{audit:?}");
        let sum: f64 = parts.iter().map(|part| part.seconds[place]).sum();
        // The rest are operators of the backward pass that belong to no part.
        assert!(sum <= audit.seconds[place] * (1.0 + 1e-9), "{audit:?}");
    }
    let kept = audit.needs_f32();
    let extra = |part: &Part| part.seconds[0] - part.seconds[1];
    let named = parts.iter().filter(|part| kept.contains(&part.path) && part.path != "last");
    assert!((named.map(extra).sum::<f64>() - audit.f32_seconds()).abs() < 1e-9, "{audit}");
    assert!(audit.to_string().contains("\n  measured cost: "), "{audit}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let _alone = alone();
    let mut vs = VarStore::new(Device::Cpu);
    let weight = vs.root().ones("w", &[4]);
    let region = region(Kind::BFloat16);
    let scaler = GradScaler::disabled();
    let mut calls = 0;
    let other = audit(&vs, &region, &scaler, |_| {
        calls += 1;
        Ok(if calls > 1 { weight.exp().sum(None) } else { weight.sum(None) })
    });
    assert!(matches!(other, Err(Error::InvalidArgument { name: "loss", .. })), "{other:?}");
    vs.bfloat16();
    let half = audit(&vs, &region, &scaler, |_| Ok(weight.sum(None)));
    let error = half.unwrap_err().to_string();
    assert!(error.contains("parameter w in half precision"), "{error}");
}

#[test]
fn a_tied_weight_is_audited_once() {
    let _alone = alone();
    for way in TIES {
        let (vs, w) = tied(way, &[0.5, -0.25], Kind::Float, Device::Cpu);
        let scaler = GradScaler::new(Device::Cpu).unwrap();
        let region = region(Kind::BFloat16);
        let loss = |region: Autocast| region.run(|| (&w * &w).sum(Kind::Float));
        let audit = audit(&vs, &region, &scaler, loss).unwrap();
        let parts = parts(&audit);
        let gradients = parts.iter().filter(|part| part.gradient.is_some());
        let paths: Vec<_> = gradients.map(|part| part.path.as_str()).collect();
        assert_eq!(paths, ["embedding"], "{way:?}: {audit}");
    }
}
