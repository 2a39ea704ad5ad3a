//! Collectives and means of a group of one rank.

use std::time::Duration;

use tch_amp::distributed::{GroupConfig, Mean, ReduceOp, Store};

use crate::tensors::{assert_takes, numbers, with_each_kind};

const DENSE: [&str; 7] =
    ["f32", "f16", "i64", "of no dimensions", "with gaps", "negative", "copy-on-write"];

#[test]
fn every_collective() {
    let store = Store::in_process().unwrap();
    let group = GroupConfig { timeout: Duration::from_secs(20), ..Default::default() }
        .join(&store, 0, 1)
        .unwrap();
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Mean] {
        let taken = with_each_kind("all_reduce", |mut tensor| {
            let before = tensor.shallow_clone();
            group.all_reduce(&mut tensor, op)?;
            assert_eq!(numbers(&tensor).len(), numbers(&before).len());
            Ok(())
        });
        let wanted = DENSE.iter().filter(|kind| op != ReduceOp::Mean || **kind != "i64");
        assert_takes("all_reduce", &taken, &wanted.copied().collect::<Vec<_>>());
    }
    let taken = with_each_kind("broadcast", |mut tensor| group.broadcast(&mut tensor, 0));
    assert_takes("broadcast", &taken, &DENSE);
    let taken = with_each_kind("all_gather", |tensor| {
        let gathered = group.all_gather(&tensor)?;
        assert_eq!(format!("{:?}", numbers(&gathered[0])), format!("{:?}", numbers(&tensor)));
        Ok(())
    });
    assert_takes("all_gather", &taken, &DENSE);
    let taken = with_each_kind("reduce_scatter", |tensor| group.reduce_scatter(&tensor).map(drop));
    assert_takes("reduce_scatter", &taken, &["f32", "f16", "i64", "with gaps", "negative"]);
}

#[test]
fn every_mean() {
    let taken = with_each_kind("Mean::add_values", |tensor| Mean::default().add_values(&tensor));
    assert_takes("Mean::add_values", &taken, &DENSE);
    let taken = with_each_kind("Mean::add", |tensor| {
        let mut mean = Mean::default();
        mean.add(&tensor, 3)?;
        assert_eq!(mean.count(), 3);
        mean.add(&tensor, 4)
    });
    assert_takes("Mean::add", &taken, &["of no dimensions"]);
}
