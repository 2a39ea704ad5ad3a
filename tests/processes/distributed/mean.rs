//! Means over batches of different sizes, beside plain f64 loops.

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::distributed::{Mean, SamplerConfig};

use super::{is_mismatch, ranks};
use testkit::rng::Rng;

/// The batches of each rank: other ranks have other numbers of them, and one has none.
fn batches(size: usize, rng: &mut Rng) -> Vec<Vec<Vec<f64>>> {
    let without = rng.below(size);
    let rank = |rank| {
        let count = if rank == without { 0 } else { rng.below(5) };
        let mut batch = |_| (0..rng.below(7)).map(|_| rng.eighth()).collect();
        (0..count).map(&mut batch).collect()
    };
    (0..size).map(rank).collect()
}

#[test]
fn every_example_counts_once() {
    let mut rng = Rng::new(5);
    for size in [1, 2, 3, 4, 4] {
        let batches = batches(size, &mut rng);
        let values: Vec<_> = batches.concat().concat();
        let expected = values.iter().sum::<f64>() / values.len() as f64;
        let results = ranks(size, |group| {
            let (mut by_means, mut by_values) = (Mean::default(), Mean::default());
            for (i, batch) in batches[group.rank()].iter().enumerate() {
                let kind = [Kind::Float, Kind::Double, Kind::BFloat16][i % 3];
                let batch = Tensor::from_slice(batch).to_kind(kind);
                by_values.add_values(&batch.view([-1, 1])).unwrap();
                // NaN for a batch without examples. The numbers are exact in every dtype, but a mean is not in bf16.
                let mean = batch.to_kind(Kind::Double).mean(Kind::Double).set_requires_grad(true);
                by_means.add(&mean, batch.numel() as u64).unwrap();
            }
            assert_eq!(by_means.count(), batches[group.rank()].concat().len() as u64);
            (by_means.reduce(&group).unwrap(), by_values.reduce(&group).unwrap())
        });
        assert!(results.windows(2).all(|pair| pair[0].0.to_bits() == pair[1].0.to_bits()));
        for (by_means, by_values) in results {
            // The values are multiples of 1/8, so that their sums are exact.
            assert!(by_values == expected || values.is_empty(), "{by_values} {expected}");
            assert!((by_means - expected).abs() < 1e-14 || values.is_empty());
            assert_eq!(values.is_empty(), by_values.is_nan());
        }
    }
}

#[test]
fn sums_are_wider_than_the_batches() {
    ranks(2, |group| {
        let mut mean = Mean::default();
        mean.add_values(&Tensor::full([9, 9], 60_000.0, (Kind::Half, Device::Cpu))).unwrap();
        mean.add(&Tensor::full([1, 1], i64::from(i32::MAX), (Kind::Int, Device::Cpu)), 81).unwrap();
        let both = (60_000.0 + f64::from(i32::MAX)) / 2.0;
        assert_eq!(mean.reduce(&group).unwrap(), both);
        // Nothing is consumed.
        assert_eq!(mean.reduce(&group).unwrap(), both);
        let mut right = Mean::default();
        right.add_values(&Tensor::from_slice(&[true, group.rank() == 0])).unwrap();
        assert_eq!(right.reduce(&group).unwrap(), 0.75);
    });
}

#[test]
fn a_nan_of_any_rank_and_a_mean_of_nothing_are_nan() {
    for broken in 0..3 {
        let results = ranks(3, |group| {
            let (mut mean, empty) = (Mean::default(), Mean::default());
            let value = if group.rank() == broken { f64::NAN } else { 1.0 };
            mean.add(&Tensor::from(value), 2).unwrap();
            let mut infinite = Mean::default();
            let value = if group.rank() == broken { f64::INFINITY } else { 1.0 };
            infinite.add(&Tensor::from(value), 2).unwrap();
            [mean, empty, infinite].map(|mean| mean.reduce(&group).unwrap())
        });
        for [mean, empty, infinite] in results {
            assert!(mean.is_nan() && empty.is_nan() && infinite == f64::INFINITY);
        }
    }
}

#[test]
fn unusable_batches_are_refused_and_other_calls_are_named() {
    ranks(2, |group| {
        let mut mean = Mean::default();
        mean.add(&Tensor::from(2f32), 1).unwrap();
        for refused in [
            mean.add(&Tensor::new(), 1),
            mean.add(&Tensor::from_slice(&[1f32, 2.0]), 1),
            mean.add_values(&Tensor::ones([2], (Kind::ComplexFloat, Device::Cpu))),
        ] {
            assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
        }
        let mismatch = match group.rank() {
            0 => mean.reduce(&group).map(drop),
            _ => group.barrier(),
        };
        let mismatch = mismatch.unwrap_err();
        assert!(
            is_mismatch(&mismatch) && mismatch.to_string().contains("rank 0 calls Mean::reduce"),
            "{mismatch}"
        );
        assert_eq!((mean.count(), mean.reduce(&group).unwrap()), (1, 2.0));
    });
}

#[test]
fn an_evaluation_sees_every_example_exactly_once() {
    // The last time, one rank has an empty batch.
    for (length, size) in [(13, 1), (13, 3), (13, 4), (3, 4)] {
        let data: Vec<f64> = (0..length).map(|i| f64::from(i * i)).collect();
        let expected = data.iter().sum::<f64>() / f64::from(length);
        let results = ranks(size, |group| {
            let sampler = SamplerConfig { pad: false, ..Default::default() }
                .build(&group, data.len())
                .unwrap();
            let mut mean = Mean::default();
            for batch in sampler.indices().unwrap().split(2, 0) {
                let values = Tensor::from_slice(&data).index_select(0, &batch);
                mean.add(&values.mean(Kind::Double), values.numel() as u64).unwrap();
            }
            mean.reduce(&group).unwrap()
        });
        assert!(results.iter().all(|mean| (mean - expected).abs() < 1e-12), "{results:?}");
    }
}
