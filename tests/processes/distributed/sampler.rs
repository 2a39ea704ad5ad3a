//! Which examples each rank gets, beside Python's `DistributedSampler`.

use serde_json::json;
use tch::Kind;
use tch_amp::Error;
use tch_amp::distributed::{DistributedSampler, SamplerConfig};

use super::ranks;
use testkit::python::Oracle;
use testkit::rng::Rng;

/// The indices of each rank.
fn shares(options: SamplerConfig, length: usize, size: usize, epoch: u64) -> Vec<Vec<i64>> {
    let share = |rank| {
        let mut sampler = options.build_for(length, rank, size).unwrap();
        sampler.set_epoch(epoch);
        let indices = sampler.indices().unwrap();
        assert_eq!((indices.kind(), indices.dim()), (Kind::Int64, 1));
        assert_eq!((indices.numel(), indices.numel() == 0), (sampler.len(), sampler.is_empty()));
        Vec::try_from(indices).unwrap()
    };
    (0..size).map(share).collect()
}

#[test]
fn the_shares_are_those_of_pytorch() {
    let Some(oracle) = Oracle::find("distributed_sampler.py") else { return };
    let mut rng = Rng::new(11);
    let mut case = |i: usize| {
        // Every third data set is about as small as the group.
        let length = 1 + rng.below(if i.is_multiple_of(3) { 8 } else { 300 });
        let seed = *rng.pick(&[0, 1, 42, -3, i64::from(u32::MAX) + 7, i64::MAX - 100, i64::MIN]);
        let options = SamplerConfig { shuffle: rng.below(4) > 0, seed, ..Default::default() };
        (
            SamplerConfig { drop_last: rng.one_in(2), ..options },
            length,
            1 + rng.below(9),
            rng.below(30) as u64,
        )
    };
    let mut cases: Vec<_> = (0..200).map(&mut case).collect();
    // Long ones, for which libtorch might use another algorithm, and one where padding repeats everything several
    // times.
    cases.push((SamplerConfig { seed: 5, ..Default::default() }, 70_001, 3, 2));
    cases.push((SamplerConfig::default(), 2, 9, 1));
    cases.push((SamplerConfig::default(), 0, 2, 1));
    let input: Vec<_> = cases
        .iter()
        .map(|(options, length, size, epoch)| {
            let SamplerConfig { shuffle, seed, drop_last, .. } = options;
            json!([length, size, seed, epoch, shuffle, drop_last])
        })
        .collect();
    let output = oracle.run(&[], &json!(input).to_string());
    let lines: Vec<_> = output.lines().collect();
    assert_eq!(lines.len(), cases.len());
    let mut left_nothing = 0;
    for ((options, length, size, epoch), line) in cases.into_iter().zip(lines) {
        let theirs: Vec<Vec<i64>> = serde_json::from_str(line).unwrap();
        if theirs[0].is_empty() {
            // PyTorch trains on nothing.
            let refused = options.build_for(length, 0, size).unwrap_err();
            let argument = if length == 0 { "length" } else { "drop_last" };
            assert!(matches!(refused, Error::InvalidArgument { name, .. } if name == argument));
            left_nothing += 1;
            continue;
        }
        let ours = shares(options, length, size, epoch);
        assert_eq!(ours, theirs, "{length} examples, {size} ranks, epoch {epoch}, {options:?}");
    }
    assert!((1..100).contains(&left_nothing));
}

#[test]
fn without_padding_every_example_is_in_one_share() {
    let mut rng = Rng::new(12);
    for _ in 0..200 {
        let (length, size) = (1 + rng.below(40), 1 + rng.below(12));
        let options = SamplerConfig { pad: false, shuffle: rng.one_in(2), ..Default::default() };
        let shares = shares(options, length, size, 3);
        let lengths: Vec<_> = shares.iter().map(Vec::len).collect();
        assert!(lengths.iter().all(|len| (length / size..=length.div_ceil(size)).contains(len)));
        assert!(lengths.is_sorted_by(|first, next| first >= next), "{lengths:?}");
        let mut all = shares.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..length as i64), "{length} examples, {size} ranks");
    }
}

#[test]
fn a_group_shares_the_examples_anew_in_each_epoch() {
    let results = ranks(3, |group| {
        let mut sampler = DistributedSampler::new(&group, 10).unwrap();
        let mut epoch = |epoch| {
            sampler.set_epoch(epoch);
            assert_eq!((sampler.epoch(), sampler.len()), (epoch, 4));
            Vec::<i64>::try_from(sampler.indices().unwrap()).unwrap()
        };
        [epoch(0), epoch(1), epoch(0)]
    });
    for epoch in 0..2 {
        let of_epoch: Vec<_> = results.iter().map(|epochs| epochs[epoch].clone()).collect();
        assert_eq!(of_epoch, shares(SamplerConfig::default(), 10, 3, epoch as u64));
    }
    assert!(results.iter().all(|[first, second, again]| first == again && first != second));
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let options = SamplerConfig::default();
    for (refused, argument) in [
        (options.build_for(0, 0, 2), "length"),
        (options.build_for(usize::MAX, 0, 2), "length"),
        (options.build_for(5, 2, 2), "rank"),
        (options.build_for(5, 0, 0), "rank"),
        (SamplerConfig { drop_last: true, ..options }.build_for(2, 0, 3), "drop_last"),
    ] {
        let refused = refused.unwrap_err();
        assert!(
            matches!(refused, Error::InvalidArgument { name, .. } if name == argument),
            "{refused}"
        );
    }
}
