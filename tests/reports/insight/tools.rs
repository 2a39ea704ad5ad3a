//! The culprits with which the tracer is compared with other tools, and the rule that judges all of them.

#[path = "../../../benches/insight_tools/cases.rs"]
mod cases;
#[path = "../../../benches/insight_tools/verdict.rs"]
mod verdict;

use cases::{CASES, Culprit, explained};
use serde_json::json;
use tch_amp::insight::Pass;
use verdict::{Named, Verdict, anomaly, hooks, judge, operator_name, tracer};

use crate::insight::alone;

#[test]
fn every_planted_culprit_is_named() {
    let _alone = alone();
    for case in CASES {
        let (_, explanation) = explained(case).unwrap();
        let verdict = judge(case.culprit, &tracer(&explanation));
        assert!(verdict.right, "{}: {verdict:?}: {explanation}", case.name);
        if matches!(case.culprit, Culprit::Forward(..) | Culprit::Backward(..)) {
            let fields = [verdict.operator, verdict.part, verdict.pass];
            assert_eq!(fields, [Some(true); 3], "{}: {explanation}", case.name);
        }
    }
}

/// The comparison can fail: what is said of one step is right only for steps with the same culprit.
#[test]
fn another_culprit_is_not_right() {
    let _alone = alone();
    let said: Vec<_> = CASES.iter().map(|case| tracer(&explained(case).unwrap().1)).collect();
    for case in CASES {
        let right = said.iter().filter(|named| judge(case.culprit, named).right).count();
        assert!((1..=3).contains(&right), "{}: {right} are right", case.name);
    }
}

const SQUARE: Culprit = Culprit::Forward(&["pow"], "planted");
const ROOT: Culprit = Culprit::Backward(&["sqrt"], "planted");

fn node(node: &str, part: &str) -> Named {
    anomaly(&json!({ "node": node, "part": part }))
}

fn module(module: &str, line: &str) -> Named {
    hooks(&json!({ "module": module, "line": line }))
}

#[test]
fn a_wrong_operator_part_or_pass_is_not_right() {
    let fields = |culprit, named: &Named| {
        let Verdict { operator, part, pass, right, .. } = judge(culprit, named);
        ([operator, part, pass].map(|field| field == Some(true)), right)
    };
    assert_eq!(fields(ROOT, &node("SqrtBackward0", "planted")), ([true; 3], true));
    assert_eq!(fields(ROOT, &node("SqrtBackward0", "last")), ([true, false, true], false));
    assert_eq!(fields(ROOT, &node("RsqrtBackward0", "planted")), ([false, true, true], false));
    // The loss is a square, too.
    assert_eq!(fields(SQUARE, &node("PowBackward0", "the loss")), ([true, false, false], false));
    assert_eq!(fields(SQUARE, &node("PowBackward0", "planted")), ([true, true, false], false));
    let unknown = Named::Operator(Vec::new(), None, Pass::Backward);
    assert_eq!(fields(ROOT, &unknown), ([false, false, true], false));
}

#[test]
fn hooks_are_judged_by_the_line_that_is_not_finite() {
    let right = |culprit, named: &Named| judge(culprit, named).right;
    assert!(right(SQUARE, &module("planted", "output")));
    assert!(!right(SQUARE, &module("last", "input[0]")));
    assert!(!right(SQUARE, &module("planted", "weight")));
    assert!(right(Culprit::Parameter("last.weight"), &module("last", "weight")));
    assert!(!right(Culprit::Parameter("last.weight"), &module("last", "output")));
    assert!(right(Culprit::Input, &module("first", "input[0]")));
    assert!(!right(Culprit::Input, &module("last", "input[0]")));
    assert!(!right(Culprit::Nothing, &module("planted.inner", "input[1]")));
}

#[test]
fn silence_is_right_only_where_nothing_is_to_blame() {
    for silent in [hooks(&json!(null)), anomaly(&json!(null))] {
        assert_eq!(silent, Named::Nothing);
        assert!(judge(Culprit::Nothing, &silent).right);
        for culprit in [SQUARE, ROOT, Culprit::Scale, Culprit::Input] {
            let verdict = judge(culprit, &silent);
            assert!(verdict.silent && !verdict.right, "{culprit:?}");
        }
    }
}

#[test]
fn operators_are_compared_by_their_whole_names() {
    for (name, other, same) in [
        ("sqrt", "SqrtBackward0", true),
        ("aten::copy_", "copy", true),
        ("native_layer_norm", "NativeLayerNormBackward0", true),
        ("conv2d", "aten::conv2d", true),
        ("root", "RootBackward", true),
        ("exp", "ExpandBackward0", false),
        ("log", "LogSoftmaxBackward0", false),
        ("mm", "AddmmBackward0", false),
    ] {
        assert_eq!(operator_name(name) == operator_name(other), same, "{name} and {other}");
    }
}
