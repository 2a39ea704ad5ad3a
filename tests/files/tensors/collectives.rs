//! Collectives and means of a group of one rank.

use tch_amp::distributed::{Mean, ReduceOp};

use crate::tensors::{group, with_each_kind};
use testkit::to_f64;

const DENSE: [&str; 7] =
    ["f32", "f16", "i64", "of no dimensions", "with gaps", "negative", "copy-on-write"];

#[test]
fn every_collective() {
    let group = group();
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Mean] {
        let taken = with_each_kind("all_reduce", |mut tensor| {
            let before = tensor.shallow_clone();
            group.all_reduce(&mut tensor, op)?;
            assert_eq!(to_f64(&tensor).len(), to_f64(&before).len());
            Ok(())
        });
        let wanted = DENSE.iter().filter(|kind| op != ReduceOp::Mean || **kind != "i64");
        taken.includes(&wanted.copied().collect::<Vec<_>>());
    }
    let taken = with_each_kind("broadcast", |mut tensor| group.broadcast(&mut tensor, 0));
    taken.includes(&DENSE);
    let taken = with_each_kind("all_gather", |tensor| {
        let gathered = group.all_gather(&tensor)?;
        assert_eq!(format!("{:?}", to_f64(&gathered[0])), format!("{:?}", to_f64(&tensor)));
        Ok(())
    });
    taken.includes(&DENSE);
    let taken = with_each_kind("reduce_scatter", |tensor| group.reduce_scatter(&tensor).map(drop));
    taken.includes(&["f32", "f16", "i64", "with gaps", "negative"]);
}

#[test]
fn every_mean() {
    let taken = with_each_kind("Mean::add_values", |tensor| Mean::default().add_values(&tensor));
    taken.includes(&DENSE);
    let taken = with_each_kind("Mean::add", |tensor| {
        let mut mean = Mean::default();
        mean.add(&tensor, 3)?;
        assert_eq!(mean.count(), 3);
        mean.add(&tensor, 4)
    });
    taken.includes(&["of no dimensions"]);
}
