//! The training step of the recipe `images`, and its averaged weights.

use std::collections::HashMap;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use crate::recipe::same::alone;
use recipes::images::batch::Set;
use recipes::images::options::Options;
use recipes::images::reader::Reader;
use recipes::images::{self, train::Trainer};
use recipes::{Ranks, Training};
use tch_amp::Amp;
use tch_amp::checkpoint::Checkpoint;

/// Runs a check with a trainer of the small model.
fn with_trainer<T>(
    change: impl FnOnce(Options) -> Options,
    check: impl FnOnce(&mut Trainer<'_>, &Set) -> T,
) -> T {
    let _random = alone();
    let (options, data) = images::small(Amp::Off, 20).unwrap();
    let options = change(options);
    let (set, ranks) = (Set::new(&data, options.moved, Device::Cpu), Ranks::alone());
    check(&mut Trainer::new(&options, &data, &set, Device::Cpu, &ranks).unwrap(), &set)
}

/// The variables in f64, by name.
fn values(variables: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    let value = |variable: &Tensor| variable.detach().to_kind(Kind::Double);
    variables.iter().map(|(name, variable)| (name.clone(), value(variable))).collect()
}

fn difference(one: &Tensor, other: &Tensor) -> f64 {
    (one - other).abs().max().double_value(&[])
}

fn channels_last_weights(vs: &VarStore) -> usize {
    let variables = vs.trainable_variables();
    let wide = variables.iter().filter(|variable| variable.dim() == 4 && variable.size()[1] > 1);
    wide.inspect(|weight| {
        for tensor in [(*weight).shallow_clone(), weight.grad()] {
            assert!(tensor.permute([0, 2, 3, 1]).is_contiguous(), "{:?}", tensor.stride());
        }
    })
    .count()
}

#[test]
fn weights_and_gradients_stay_channels_last_also_after_a_checkpoint() {
    with_trainer(
        |options| options,
        |trainer, _| {
            drop(trainer.step().unwrap());
            assert_eq!(channels_last_weights(trainer.weights()), 5);
            let mut saved = Checkpoint::new();
            trainer.save(&mut saved).unwrap();
            trainer.restore(&saved).unwrap();
            drop(trainer.step().unwrap());
            assert_eq!(channels_last_weights(trainer.weights()), 5);
        },
    );
}

#[test]
fn the_layout_changes_the_numbers_by_rounding_only() {
    let losses = |channels_first| {
        with_trainer(
            |options| Options { channels_first, ..options },
            |trainer, _| {
                let mut loss = |_| trainer.step().unwrap().loss.double_value(&[]);
                (0..8).map(&mut loss).collect::<Vec<_>>()
            },
        )
    };
    let (last, first) = (losses(false), losses(true));
    for (last, first) in last.iter().zip(&first) {
        assert!((last - first).abs() < 1e-3, "{last} and {first}");
    }
    assert!(last[7] < last[0], "{last:?}");
}

#[test]
fn the_averages_are_those_of_every_second_step_of_the_last_quarter() {
    with_trainer(|options| options, check_averages);
}

fn check_averages(trainer: &mut Trainer<'_>, set: &Set) {
    let variables = trainer.weights().variables();
    let (mut sum, mut lrs) = (HashMap::<String, Tensor>::new(), Vec::new());
    for step in 1..=20 {
        lrs.push(trainer.step().unwrap().lr);
        if [17, 19, 20].contains(&step) {
            for (name, value) in values(&variables) {
                let before = sum.remove(&name).unwrap_or_else(|| value.zeros_like());
                sum.insert(name, before + value);
            }
        }
    }
    // A warm-up of two steps, the cosine, and the rate of the averaged steps.
    let part = |step: usize| lrs[step - 1] / 0.05;
    assert!((part(1) - 0.1).abs() < 1e-9 && (part(3) - 1.0).abs() < 1e-9, "{lrs:?}");
    assert!(part(15) > 0.2 && (16..=20).all(|step| (part(step) - 0.2).abs() < 1e-9), "{lrs:?}");

    let last = values(&variables);
    drop(trainer.test().unwrap());
    let averages = trainer.averages().swap_in().unwrap();
    let averaged = values(&variables);
    for (name, average) in averaged.iter().filter(|(name, _)| !name.contains("running")) {
        let mean = &sum[name] / 3.0;
        assert!(difference(average, &mean) < 1e-6, "{name}");
        assert!(difference(average, &last[name]) > 1e-6, "{name}");
    }
    // The statistics of the first layer, from the four batches that the options ask for.
    let mut reader = Reader::new(&set.train, false, 0);
    let mut means = 0.0 * &averaged["first.norm.running_mean"];
    for _ in 0..4 {
        let images = set.train.take(&reader.next(16)).images.to_kind(Kind::Double);
        let (stride, padding, dilation) = ([2_i64, 2], [1_i64, 1], [1_i64, 1]);
        let weight = &averaged["first.conv.weight"];
        let outputs =
            no_grad(|| images.conv2d(weight, None::<&Tensor>, stride, padding, dilation, 1));
        means += outputs.mean_dim([0_i64, 2, 3].as_slice(), false, Kind::Double) / 4.0;
    }
    assert!(difference(&averaged["first.norm.running_mean"], &means) < 1e-5);
    assert!(difference(&last["first.norm.running_mean"], &means) > 1e-3);
    drop(averages);
}
