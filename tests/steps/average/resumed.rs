//! Averages continue from a checkpoint.

use tch::Kind;
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Tensor};
use tch_amp::average::{Averaging, Ema, Swa};

use super::{model, random, set};
use testkit::checkpoints::checkpoint_of;
use testkit::rng::Rng;
use testkit::tensors::{TIES, Tie, tie, tied};
use testkit::to_f64;

#[test]
fn a_restored_average_continues_with_the_same_numbers() {
    let mut rng = Rng::new(8);
    let options: [Averaging; 4] = [
        Ema { decay: 0.9, ..Ema::default() }.into(),
        Ema { decay: 0.99, warmup: true, ..Ema::default() }.into(),
        Ema { decay: 0.99, debias: true, ..Ema::default() }.into(),
        Swa::default().into(),
    ];
    for averaging in options {
        let (vs, w) = model(Kind::BFloat16, 9);
        let mut whole = averaging.build(&vs).unwrap();
        for _ in 0..3 {
            set(&w, &random(&mut rng, 9));
            whole.advance().unwrap();
        }
        let checkpoint = checkpoint_of([("average", &mut whole)]);
        let mut new = averaging.build(&vs).unwrap();
        checkpoint.restore().add("average", &mut new).apply().unwrap();
        for _ in 0..3 {
            set(&w, &random(&mut rng, 9));
            whole.advance().unwrap();
            new.advance().unwrap();
        }
        let of = |average: &tch_amp::average::AveragedWeights| {
            (to_f64(&average.average("w").unwrap()), average.updates().unwrap())
        };
        assert_eq!(of(&new), of(&whole), "{averaging:?}");
    }
}

#[test]
fn the_statistics_are_saved_as_well() {
    let build = || {
        let vs = VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root() / "norm", 3, Default::default());
        (vs, norm)
    };
    let (vs, norm) = build();
    let mut swa = Swa::default().build(&vs).unwrap();
    swa.advance().unwrap();
    let xs = Tensor::randn([16, 3], (Kind::Float, Device::Cpu));
    swa.update_batch_norm(0.1, [&xs], |xs| Ok(norm.forward_t(xs, true))).unwrap();
    let checkpoint = checkpoint_of([("swa", &mut swa)]);

    let (new_vs, new_norm) = build();
    let mut new = Swa::default().build(&new_vs).unwrap();
    checkpoint.restore().add("swa", &mut new).apply().unwrap();
    let [_one, _two] = [swa.swap_in().unwrap(), new.swap_in().unwrap()];
    assert_eq!(norm.forward_t(&xs, false), new_norm.forward_t(&xs, false));
}

#[test]
fn a_tied_weight_is_saved_under_every_name_and_restored_from_any() {
    let average = |vs: &VarStore| Ema { decay: 0.5, ..Ema::default() }.build(vs).unwrap();
    for way in TIES {
        let (vs, w) = tied(way, &[3.0], Kind::Float, Device::Cpu);
        let mut saved = average(&vs);
        saved.advance().unwrap();
        let whole = checkpoint_of([("average", &mut saved)]);
        // A model that has only one of the names reads it from the file.
        for name in ["embedding", "head"] {
            let one = VarStore::new(Device::Cpu);
            let _w = one.root().zeros(name, &[1]);
            let mut average_of_one = average(&one);
            let restore = whole.restore().strict(false).add("average", &mut average_of_one);
            assert!(restore.apply().unwrap().missing_keys.is_empty());
            assert_eq!(to_f64(&average_of_one.average(name).unwrap()), [3.0]);
            // The other way round, the tied weight takes it from the one name.
            let part = checkpoint_of([("average", &mut average_of_one)]);
            set(&w, &[7.0]);
            let mut restored = average(&vs);
            part.restore().add("average", &mut restored).apply().unwrap();
            assert_eq!(to_f64(&restored.average("head").unwrap()), [3.0], "{way:?} {name}");
        }
        whole.restore().add("average", &mut average(&vs)).apply().unwrap();
    }
}

/// The statistics of a norm that two parts of a model share.
#[test]
fn tied_statistics_are_swapped_once_and_restored_from_any_name() {
    let build = |names: &[&str]| {
        let vs = VarStore::new(Device::Cpu);
        let config = nn::BatchNormConfig { ws_init: nn::Init::Const(1.0), ..Default::default() };
        let norm = nn::batch_norm1d(vs.root() / names[0], 2, config);
        let all = vs.variables();
        for name in &names[1..] {
            for last in ["running_mean", "running_var", "weight", "bias"] {
                let variable = &all[&format!("{}.{last}", names[0])];
                tie(&vs, Tie::Insert, &format!("{name}.{last}"), variable);
            }
        }
        (vs, norm)
    };
    let xs = Tensor::from_slice(&[1f32, 2.0, 5.0, 6.0]).view([2, 2]);
    let computed = |names: &[&str]| {
        let (vs, norm) = build(names);
        let mut swa = Swa::default().build(&vs).unwrap();
        swa.advance().unwrap();
        swa.update_batch_norm(0.1, [&xs], |xs| Ok(norm.forward_t(xs, true))).unwrap();
        (vs, norm, swa)
    };
    let forward = |norm: &nn::BatchNorm| to_f64(&norm.forward_t(&xs, false));
    let (_vs, norm, mut plain) = computed(&["one"]);
    let (before, expected) = (forward(&norm), {
        let _swapped = plain.swap_in().unwrap();
        forward(&norm)
    });
    let (_tied_vs, tied_norm, mut tied) = computed(&["two", "one"]);
    let swapped = tied.swap_in().unwrap();
    assert_eq!(forward(&tied_norm), expected);
    drop(swapped);
    assert_eq!(forward(&tied_norm), before);
    // From a file with one of the names, and from one with both.
    for source in [&mut plain, &mut tied] {
        let checkpoint = checkpoint_of([("swa", source)]);
        let (vs, norm) = build(&["two", "one"]);
        let mut restored = Swa::default().build(&vs).unwrap();
        checkpoint.restore().add("swa", &mut restored).apply().unwrap();
        let _swapped = restored.swap_in().unwrap();
        assert_eq!(forward(&norm), expected);
    }
}
