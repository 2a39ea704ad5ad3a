//! The page of a run: what it shows, and that nothing in it can break it.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{
    Budget, HealthReport, Page, Profiler, ScaleHealth, ScaleHistory, SkipCause, Tracer, audit,
    named,
};
use tch_amp::optim::AdamW;
use tch_amp::{Autocast, Error, GradScaler};

use crate::insight::alone;
use testkit::files::Folder;
use testkit::html::unclosed_tags;
use testkit::rows::rows;

/// A name that must be escaped wherever it is shown.
const HOSTILE: &str = "<script>&\"attention\"";

/// A run in fp16 of 30 steps, of which the 12th has a batch whose product overflows.
fn page() -> Page {
    let _alone = alone();
    tch::manual_seed(5);
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root() / "<b>layer", 4, 4, Default::default());
    let mut optimizer = AdamW::default().build(&vs, 1e-3).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let region = Autocast::new(Device::Cpu).dtype(Kind::Half);
    let mut page = Page::new("A run <of> \"fp16\"");
    let (mut tracer, mut health) = (Tracer::new(&vs).unwrap(), ScaleHealth::new(&vs));
    let mut history = ScaleHistory::new(100).unwrap();
    let model = |x: &Tensor| {
        let y = x.apply(&layer);
        named(HOSTILE, || y.mm(&y.tr())).to_kind(Kind::Float).square().mean(None)
    };
    for step in 1..=30 {
        let size = if step == 12 { 3e3 } else { 1.0 };
        let x = (Tensor::randn([8, 4], (Kind::Float, Device::Cpu))) * size;
        let compute = || region.run(|| model(&x));
        tracer.begin(&scaler).unwrap();
        optimizer.zero_grad().unwrap();
        let loss = compute().unwrap();
        scaler.backward(&loss).unwrap();
        health.observe(&scaler).unwrap();
        let outcome = scaler.step_clip_norm(&mut optimizer, 1.0).unwrap();
        history.set_loss(&loss).unwrap();
        history.record(&scaler, &outcome, 1e-3 * f64::from(step)).unwrap();
        scaler.update().unwrap();
        page.explanations.extend(tracer.explain_if_skipped(&scaler, &outcome, compute).unwrap());
        if step % 10 == 0 {
            page.health.push((step as u64, health.report().unwrap()));
            health.clear();
        }
    }
    page.history = Some(history.report().unwrap());
    let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    let audited = audit(&vs, &region, &scaler, |region| {
        region.run(|| {
            let y = x.apply(&layer) + 1000.0;
            let norm = || y.layer_norm([4], None::<&Tensor>, None::<&Tensor>, 1e-5, false);
            named(HOSTILE, norm).to_kind(Kind::Float).square().mean(None)
        })
    });
    page.audits.push(audited.unwrap());
    let budget = Budget::new(&vs, region).measure(
        || AdamW::default().build(&vs, 1e-3),
        |run, optimizer| {
            let loss = run.region(|| model(&x))?;
            let _outcome = run.scaler().backward_step(optimizer, &loss)?;
            Ok(loss)
        },
    );
    page.budgets.push(budget.unwrap());
    let report = Profiler::new(&vs).run(|| Ok(region.run(|| model(&x))?.f_backward()?)).unwrap();
    page.operators.push(report);
    page
}

#[test]
fn the_page_shows_what_happened() {
    let page = page();
    let history = page.history.as_ref().unwrap();
    let steps: Vec<Value> = rows(history, "steps");
    assert!(steps[11]["skipped"] == "Overflow", "{history}");
    let html = page.to_html();
    for heading in [
        "Loss",
        "Loss scale",
        "Norm of the gradients",
        "Learning rate",
        "Skipped steps",
        "Exponents of the gradients",
        "Audit in fp16",
        "Precision budget of fp16",
        "Operators",
    ] {
        assert!(html.contains(&format!("<h2>{heading}</h2>")), "{heading}");
    }
    assert_eq!(html.matches("<svg").count(), 6);
    // Each skipped step has a cross, whose text names the culprit, a row and an explanation.
    let culprit = "aten::mm in &lt;script&gt;&amp;&quot;attention&quot;, fp16, forward";
    let skipped = history.skips(SkipCause::Overflow);
    assert_eq!(html.matches(r#"<path class="mark""#).count(), skipped + 1, "one in the legend");
    assert!(html.contains(&format!("<title>step 12 skipped: {culprit}</title>")), "{html}");
    assert!(html.contains(&format!("<td>{culprit}</td>")));
    assert!(html.contains(&format!("<summary>step 12: {culprit}</summary>")));
    // The norm loses its precision, so its row is the first.
    let audit = html.split("<h2>Audit").nth(1).unwrap();
    let first = audit.split("<tbody>").nth(1).unwrap().split("</td>").nth(1).unwrap();
    assert!(first.ends_with("magnifies the rounding of its inputs"), "{first}");
}

#[test]
fn the_page_is_well_formed_and_loads_nothing() {
    let page = page();
    let html = page.to_html();
    assert_eq!(unclosed_tags(&html), [""; 0]);
    assert!(!html.contains("<script") && !html.contains("<b>"));
    for loader in ["src=", "<link", "@import", "url("] {
        assert!(!html.contains(loader), "{loader}");
    }
    for svg in html.split("<svg").skip(1).filter_map(|rest| rest.split("</svg>").next()) {
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
    let nothing = Page::new("").to_html();
    assert_eq!(unclosed_tags(&nothing), [""; 0]);
}

#[test]
fn the_page_is_data_and_text_and_a_file() {
    let page = page();
    let json = serde_json::to_string(&page).unwrap();
    let read: Page = serde_json::from_str(&json).unwrap();
    assert_eq!(read, page);
    let text = page.to_string();
    for part in [
        page.title.clone(),
        page.history.as_ref().unwrap().to_string(),
        page.explanations[0].to_string(),
        page.health[2].1.to_string(),
        page.audits[0].to_string(),
        page.budgets[0].to_string(),
    ] {
        assert!(text.contains(&part), "{part}");
    }
    let (folder, path) = Folder::with("page.html");
    page.write(&path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), page.to_html());
    let error = page.write(folder.file("no/page.html")).unwrap_err();
    assert!(matches!(error, Error::Save(_)), "a page is no checkpoint: {error:?}");
    assert!(error.to_string().contains("/no"), "{error}");
}

/// Three gradients, whose exponents are further apart than the rows of a heat map.
fn wide(exponent: f64) -> HealthReport {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[3]);
    let sizes = Tensor::from_slice(&[exponent - 100.0, exponent, exponent + 3.0]).exp2();
    let mut health = ScaleHealth::new(&vs);
    (w * sizes.to_kind(Kind::Float)).sum(None).backward();
    health.observe(&GradScaler::disabled()).unwrap();
    health.report().unwrap()
}

/// Every column of the heat map over time holds all of its gradients, whatever the range.
#[test]
fn the_shares_of_a_column_add_up() {
    let mut page = page();
    page.health = vec![(1, wide(-20.0)), (2, wide(100.0)), (3, wide(0.0))];
    let html = page.to_html();
    let map = html.split("<svg").find(|svg| svg.contains("over time")).unwrap();
    for step in 1..=3 {
        let title = format!("<title>step {step}, ");
        let shares = map.split(&title).skip(1).map(|title| {
            let share = title.split(": ").nth(1).unwrap().split(" %").next().unwrap();
            share.parse::<f64>().unwrap()
        });
        let shares: Vec<f64> = shares.collect();
        assert!((shares.iter().sum::<f64>() - 100.0).abs() < 0.1, "step {step}: {shares:?}");
    }
}

/// The paths of all numbers, and of texts that stand for numbers.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.to_owned()),
        Value::String(text) if text.parse::<f64>().is_ok() => found.push(path.to_owned()),
        Value::Array(list) => {
            let parts = list.iter().enumerate();
            parts.for_each(|(index, part)| numbers(part, &format!("{path}/{index}"), found));
        }
        Value::Object(map) => {
            let escaped = |key: &str| key.replace('~', "~0").replace('/', "~1");
            let parts = map.iter();
            parts.for_each(|(key, part)| numbers(part, &format!("{path}/{}", escaped(key)), found));
        }
        _ => {}
    }
}

/// Everything that computes with the numbers of a page.
fn use_numbers(page: &Page) {
    drop((page.to_html(), page.to_string()));
    for report in &page.operators {
        let _sums = (report.flops(), report.own_seconds(), report.half_share(None));
    }
}

/// One number of a page, the same number of all parts of a list, or all of a kind are replaced by those that no run has.
#[test]
fn numbers_of_a_damaged_file_break_nothing() {
    let mut page = page();
    page.health.push((40, wide(0.0)));
    let whole = serde_json::to_value(page).unwrap();
    let mut paths = Vec::new();
    numbers(&whole, "", &mut paths);
    let mut kinds: BTreeMap<String, Vec<&String>> = BTreeMap::new();
    for path in &paths {
        let kind: String = path.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        kinds.entry(kind).or_default().push(path);
    }
    assert!(kinds.len() > 60, "{}", kinds.len());
    let hostile = [
        json!(u64::MAX),
        json!(u64::MAX / 2 + 1),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(i32::MAX),
        json!(i32::MIN),
        json!(u32::MAX),
        json!(0),
        json!(1e308),
        json!(-1e308),
        json!(5e-324),
        json!("NaN"),
        json!("inf"),
    ];
    let (mut read, mut broken) = (0, Vec::new());
    for (kind, paths) in &kinds {
        for damaged in [&paths[..], &paths[..1], &paths[paths.len() - 1..]] {
            for number in &hostile {
                let mut value = whole.clone();
                for path in damaged {
                    *value.pointer_mut(path).unwrap() = number.clone();
                }
                let Ok(page) = serde_json::from_value::<Page>(value) else { continue };
                read += 1;
                if std::panic::catch_unwind(|| use_numbers(&page)).is_err() {
                    broken.push(format!("{kind} = {number}, {} of them", damaged.len()));
                }
            }
        }
    }
    assert!(read > 1000, "{read}");
    assert!(broken.is_empty(), "{} panics: {broken:#?}", broken.len());
}

#[test]
fn an_unbalanced_tag_is_found() {
    assert_eq!(unclosed_tags("<p><b>x</b><br></p>"), [""; 0]);
    assert_eq!(unclosed_tags("<p><b>x</p>"), ["p", "b", "/p"]);
    assert_eq!(unclosed_tags("<svg><line x='1'/></svg><p>"), ["p"]);
}
