//! The culprits with which the tracer is compared with other tools.

#[path = "../../benches/insight_tools/cases.rs"]
mod cases;

use cases::{CASES, explained, is_right};

use crate::alone;

#[test]
fn every_planted_culprit_is_named() {
    let _alone = alone();
    for case in CASES {
        let (_, explanation) = explained(case).unwrap();
        assert!(is_right(case, &explanation), "{}: {explanation}", case.name);
    }
}

/// The comparison can fail: what is said of one step is right only for steps with the same culprit.
#[test]
fn another_culprit_is_not_right() {
    let _alone = alone();
    let explanations: Vec<_> = CASES.iter().map(|case| explained(case).unwrap().1).collect();
    for case in CASES {
        let right = explanations.iter().filter(|explanation| is_right(case, explanation)).count();
        assert!((1..=3).contains(&right), "{}: {right} are right", case.name);
    }
}
