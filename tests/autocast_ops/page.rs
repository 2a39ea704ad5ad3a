//! Compares `docs/operations.md`, the page of the guide with autocast's lists, with PyTorch and libtorch.
//!
//! The page has the lists of every tested libtorch, and a run compares those of one. To write them into the page:
//!
//! ```text
//! TCH_AMP_BLESS=1 cargo xtask simulate cargo test --test autocast_ops page
//! TCH_AMP_BLESS=1 cargo xtask simulate --tch 0.24 cargo test --test autocast_ops page
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use tch::Kind;

use crate::common::{is_set, python};
use crate::cuda::{self, List};
use crate::oracle::{self, Answers, Case};

const HOW: &str = "write it anew with `TCH_AMP_BLESS=1 cargo xtask simulate cargo test --test autocast_ops page`, and \
    with `cargo xtask simulate --tch V` for each other version of tch";

/// The versions of libtorch that the page covers. An operation without a version behind it is on the list of all.
const VERSIONS: [&str; 2] = ["2.11", "2.13"];

const HALF: &str = "In the dtype of the region";
const F32: &str = "In f32";
const F32_UNLESS_ASKED: &str = "In f32, unless the call asks for a dtype";
const WIDEST: &str = "In the widest dtype of the inputs";
const REFUSED: &str = "Refused";

/// The lists of the page, in its order.
const HEADINGS: [&str; 5] = [HALF, F32, F32_UNLESS_ASKED, WIDEST, REFUSED];

/// The two parts of the page.
const DEVICES: [&str; 2] = ["cpu", "cuda"];

/// Operations whose results on the CPU do not show their list, and their lists in libtorch's `autocast_mode.cpp`.
const NOT_SHOWN_ON_CPU: [(&str, &str); 3] = [
    // tch always names a driver, which only CUDA accepts.
    ("linalg_svd", F32),
    ("linalg_svdvals", F32),
    // tch does not bind it.
    ("multilabel_margin_loss_forward", F32),
];

/// Operations of CUDA without an entry in libtorch's header, and their lists in `autocast_mode.cpp`.
const NOT_SHOWN_ON_CUDA: [(&str, &str); 1] = [("_cudnn_rnn", HALF)];

/// A device, a heading and an operation.
type Entry = (String, String, String);

/// The versions for which each entry holds.
type Page = BTreeMap<Entry, BTreeSet<String>>;

const LINE: usize = 120;

#[test]
fn the_page_has_the_lists_of_this_libtorch() {
    let Some(answers) = oracle::answers() else {
        return;
    };
    let version = minor(&answers.torch);
    assert!(
        VERSIONS.contains(&version.as_str()),
        "the page does not cover libtorch {version}: add it to VERSIONS"
    );
    let path = python::root().join("docs/operations.md");
    let text = fs::read_to_string(&path).expect("the page is readable");
    let mut page = read(&text);
    let lists = lists(answers);
    let listed: BTreeSet<_> = page
        .iter()
        .filter(|(_, on)| on.contains(&version))
        .map(|(entry, _)| entry.clone())
        .collect();
    let differences: Vec<_> = lists.symmetric_difference(&listed).collect();
    if is_set("TCH_AMP_BLESS") {
        page.values_mut().for_each(|on| on.retain(|other| *other != version));
        for entry in lists {
            page.entry(entry).or_default().insert(version.clone());
        }
        fs::write(path, write(&text, &page)).expect("the page can be written");
        return;
    }
    assert!(
        differences.is_empty(),
        "docs/operations.md and libtorch {version} differ in {differences:?}: {HOW}"
    );
    assert_eq!(text, write(&text, &page), "docs/operations.md was edited by hand: {HOW}");
}

/// `2.13` of `2.13.0+cu130`.
fn minor(version: &str) -> String {
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

/// The name of the operation without its overload.
fn name(op: &str) -> &str {
    op.split('.').next().unwrap_or(op)
}

/// The lists of the libtorch of this run.
fn lists(answers: &Answers) -> BTreeSet<Entry> {
    let on_cpu = answers.registered.iter().map(|op| ("cpu", op, on_cpu(answers, op)));
    let on_cuda = answers.registered_on_cuda.iter().map(|op| ("cuda", op, on_cuda(answers, op)));
    let mut headings = BTreeMap::new();
    let entry = |(device, op, heading): (&str, &String, &'static str)| {
        let name = name(op).to_owned();
        let other = headings.insert((device.to_owned(), name.clone()), heading);
        assert!(other.is_none_or(|other| other == heading), "{name} is on two lists on {device}");
        (device.to_owned(), heading.to_owned(), name)
    };
    on_cpu.chain(on_cuda).map(entry).collect()
}

/// The list of an operation on the CPU, inferred from Python's results.
fn on_cpu(answers: &Answers, op: &str) -> &'static str {
    if let Some((_, heading)) = NOT_SHOWN_ON_CPU.iter().find(|(name, _)| *name == op) {
        return heading;
    }
    // Overloads are on the same list, and the cases of one may show more than those of another.
    let cases = answers.cases.iter().filter(|case| name(case.op()) == name(op));
    let shown: BTreeSet<_> = cases.filter_map(shows).collect();
    // Inputs of both dtypes give f32 on the f32 list, too.
    let heading = [F32, HALF, WIDEST].into_iter().find(|heading| shown.contains(heading));
    heading
        .unwrap_or_else(|| panic!("no case shows the list of {op}: add one to autocast_cases.py"))
}

/// The list that one case implies.
fn shows(case: &Case) -> Option<&'static str> {
    let args = case.args().tensors();
    let kinds: BTreeSet<_> = args
        .iter()
        .filter(|arg| arg.is_floating_point())
        .map(|arg| format!("{:?}", arg.kind()))
        .collect();
    let (f32, half) = (format!("{:?}", Kind::Float), format!("{:?}", case.dtype()));
    let outputs = case.expected().ok()?;
    let (first, ..) = outputs.into_iter().flatten().next()?;
    match (kinds.contains(&f32), kinds.contains(&half), kinds.len(), first == case.dtype()) {
        (true, false, 1, true) => Some(HALF),
        (false, true, 1, false) => Some(F32),
        (true, true, 2, false) => Some(WIDEST),
        _ => None,
    }
}

/// The list of an operation on CUDA, from libtorch's header.
fn on_cuda(answers: &Answers, op: &str) -> &'static str {
    if let Some((_, heading)) = NOT_SHOWN_ON_CUDA.iter().find(|(name, _)| *name == op) {
        return heading;
    }
    match cuda::list(answers, op).unwrap_or_else(|| panic!("{op} is on no list of CUDA")) {
        List::LowerPrecisionFp => HALF,
        List::Fp32 => F32,
        List::Fp32SetOptDtype | List::Fp32AppendDtype => F32_UNLESS_ASKED,
        List::Promote => WIDEST,
        List::Banned => REFUSED,
    }
}

fn begin(device: &str) -> String {
    format!("<!-- generated: {device} -->\n")
}

const END: &str = "<!-- end -->\n";

/// The text before, in and after the generated part of a device.
fn parts<'a>(text: &'a str, device: &str) -> [&'a str; 3] {
    let begin = begin(device);
    let start = text.find(&begin).expect("the page has a marker for the device") + begin.len();
    let end = start + text[start..].find(END).expect("the marker has an end");
    [&text[..start], &text[start..end], &text[end..]]
}

fn read(text: &str) -> Page {
    let mut page = Page::new();
    for device in DEVICES {
        let mut heading = "";
        for line in parts(text, device)[1].lines() {
            if let Some(title) = line.strip_prefix("### ") {
                heading = title;
                continue;
            }
            // Every second piece is between backticks, and the text after it may name versions.
            let pieces: Vec<_> = line.split('`').collect();
            for pair in pieces[1..].chunks(2).filter(|pair| pair.len() == 2) {
                let marked: BTreeSet<_> = VERSIONS
                    .into_iter()
                    .filter(|version| pair[1].contains(version))
                    .map(str::to_owned)
                    .collect();
                let all = || VERSIONS.map(str::to_owned).into();
                let on = if marked.is_empty() { all() } else { marked };
                page.insert((device.to_owned(), heading.to_owned(), pair[0].to_owned()), on);
            }
        }
    }
    page
}

fn write(text: &str, page: &Page) -> String {
    let mut text = text.to_owned();
    for device in DEVICES {
        let mut generated = String::new();
        for heading in HEADINGS {
            let of = |(entry, on): (&Entry, &BTreeSet<String>)| {
                let here = entry.0 == device && entry.1 == heading && !on.is_empty();
                here.then(|| word(&entry.2, on))
            };
            let words: Vec<_> = page.iter().filter_map(of).collect();
            if !words.is_empty() {
                generated += &format!("\n### {heading}\n\n{}\n", wrapped(&words));
            }
        }
        let [before, _, after] = parts(&text, device);
        text = format!("{before}{generated}\n{after}");
    }
    text
}

fn word(op: &str, on: &BTreeSet<String>) -> String {
    let versions = on.iter().map(String::as_str).collect::<Vec<_>>();
    if versions == VERSIONS {
        format!("`{op}`")
    } else {
        format!("`{op}` ({})", versions.join(", "))
    }
}

fn wrapped(words: &[String]) -> String {
    let mut lines = vec![String::new()];
    for (i, word) in words.iter().enumerate() {
        let word = if i + 1 == words.len() { word.clone() } else { format!("{word},") };
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(&word);
        } else if line.len() + 1 + word.len() <= LINE {
            line.push(' ');
            line.push_str(&word);
        } else {
            lines.push(word);
        }
    }
    lines.join("\n")
}
