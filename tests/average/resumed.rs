//! Averages continue from a checkpoint.

use tch::Kind;
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Tensor};
use tch_amp::average::{Averaging, Ema, Swa};
use tch_amp::checkpoint::Checkpoint;

use super::{model, random, set, values};
use crate::common::rng::Rng;

#[test]
fn a_restored_average_continues_with_the_same_numbers() {
    let mut rng = Rng::new(8);
    let options: [Averaging; 4] = [
        Ema::new(0.9).into(),
        Ema::new(0.99).warmup(true).into(),
        Ema::new(0.99).debias(true).into(),
        Swa::default().into(),
    ];
    for averaging in options {
        let (vs, w) = model(Kind::BFloat16, 9);
        let mut whole = averaging.build(&vs).unwrap();
        for _ in 0..3 {
            set(&w, &random(&mut rng, 9));
            whole.advance().unwrap();
        }
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("average", &mut whole).unwrap();
        let mut new = averaging.build(&vs).unwrap();
        checkpoint.restore().add("average", &mut new).apply().unwrap();
        for _ in 0..3 {
            set(&w, &random(&mut rng, 9));
            whole.advance().unwrap();
            new.advance().unwrap();
        }
        let of = |average: &tch_amp::average::AveragedWeights| {
            (values(&average.average("w").unwrap()), average.updates().unwrap())
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
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("swa", &mut swa).unwrap();

    let (new_vs, new_norm) = build();
    let mut new = Swa::default().build(&new_vs).unwrap();
    checkpoint.restore().add("swa", &mut new).apply().unwrap();
    let [_one, _two] = [swa.swap_in().unwrap(), new.swap_in().unwrap()];
    assert_eq!(norm.forward_t(&xs, false), new_norm.forward_t(&xs, false));
}
