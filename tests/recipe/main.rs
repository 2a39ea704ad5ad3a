//! What the larger examples share: their logs, and what becomes of a run that is killed or interrupted.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod classifier;
#[path = "../common/mod.rs"]
mod common;
mod competing;
mod files;
#[path = "../../examples/gan/mod.rs"]
#[allow(dead_code, reason = "`tests/examples.rs` uses the rest")]
mod gan;
#[path = "../../examples/gpt/mod.rs"]
#[allow(dead_code, reason = "`tests/examples.rs` uses the rest")]
mod gpt;
#[path = "../../examples/images/mod.rs"]
#[allow(dead_code, reason = "`tests/examples.rs` uses the rest")]
mod images;
mod interrupt;
mod log;
mod options;
mod output;
#[cfg(feature = "distributed")]
mod picture_ranks;
mod pictures;
mod program;
#[path = "../../examples/recipe/mod.rs"]
mod recipe;
mod resumed;
mod same;
#[path = "../../examples/text_classifier/mod.rs"]
#[allow(dead_code, reason = "`tests/examples.rs` uses the rest")]
mod text_classifier;
mod trainer;

#[cfg(not(feature = "distributed"))]
#[test]
fn without_the_feature_several_ranks_are_refused() {
    let error = recipe::Ranks::start(Some(2)).unwrap_err().to_string();
    assert!(error.contains("the feature `distributed`"), "{error}");
    assert_eq!(recipe::Ranks::start(None).unwrap().unwrap().size(), 1);
}
