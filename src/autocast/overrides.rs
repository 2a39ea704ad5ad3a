//! The rules by which regions override autocast's lists.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::autocast::plan::{Rule, RunAs};
use crate::error::{AutocastError, Error, Result};
use crate::ffi::{self, RawRule, Refused, RunCode};

/// A list of rules. Equal lists are the same, and live as long as the process: a captured state can come back to
/// them at any time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Overrides(&'static List);

#[derive(Debug, Default, PartialEq)]
struct List {
    /// The rules of each operator, by its name with its namespace. Of these, the last that applies counts.
    rules: Rules,
    /// The number by which libtorch's side knows the list, once a region has used it.
    number: OnceLock<u32>,
}

type Rules = BTreeMap<String, Vec<Rule>>;

static LISTS: Mutex<Vec<&'static List>> = Mutex::new(Vec::new());

fn interned(rules: Rules) -> Overrides {
    let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(list) = lists.iter().find(|list| list.rules == rules) {
        return Overrides(list);
    }
    let list: &'static List = Box::leak(Box::new(List { rules, ..List::default() }));
    lists.push(list);
    Overrides(list)
}

/// Adds a rule behind the others of its operator, and leaves out those that cannot apply any more.
fn add(rules: &mut Rules, rule: Rule) {
    let known = rules.entry(rule.operator.clone()).or_default();
    if rule.is_for_all() {
        known.clear();
    }
    known.retain(|known| *known != rule);
    known.push(rule);
}

impl Overrides {
    /// The list with these rules in addition.
    pub(super) fn with(list: Option<Self>, added: impl IntoIterator<Item = Rule>) -> Self {
        let mut rules = list.map(|list| list.0.rules.clone()).unwrap_or_default();
        for mut rule in added {
            if !rule.operator.contains("::") {
                rule.operator.insert_str(0, "aten::");
            }
            add(&mut rules, rule);
        }
        interned(rules)
    }

    /// The number of this list and of what it does not override of an enclosing region's.
    pub(super) fn inside(self, enclosing: u32) -> Result<u32> {
        if enclosing == 0 {
            return self.number();
        }
        if self.0.number.get() == Some(&enclosing) {
            return Ok(enclosing);
        }
        let around = {
            let lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
            lists.iter().find(|list| list.number.get() == Some(&enclosing)).copied()
        };
        let mut rules = around.map(|list| list.rules.clone()).unwrap_or_default();
        self.0.rules.values().flatten().for_each(|rule| add(&mut rules, rule.clone()));
        interned(rules).number()
    }

    /// Returns an error unless every operator of the list exists and can be overridden.
    pub(super) fn check(self) -> Result<()> {
        self.number().map(drop)
    }

    fn number(self) -> Result<u32> {
        if let Some(number) = self.0.number.get() {
            return Ok(*number);
        }
        if self.0.rules.is_empty() {
            return Ok(0);
        }
        let rules: Vec<_> = self.0.rules.values().flatten().collect();
        let raw: Result<Vec<_>> = rules.iter().map(|rule| raw(rule)).collect();
        match ffi::overrides_add(&raw?)? {
            // If two threads came here at once, either number will do.
            Ok(number) => Ok(*self.0.number.get_or_init(|| number)),
            Err((index, refused)) => {
                let operator = rules.get(index).map(|rule| rule.operator.clone());
                let operator = operator.unwrap_or_default();
                Err(Error::Autocast(match refused {
                    Refused::Unknown => AutocastError::UnknownOperator { operator },
                    Refused::Aliases => AutocastError::NotOverridable { operator },
                    Refused::Whole => AutocastError::NotComposable { operator },
                }))
            }
        }
    }
}

/// The rule as the shim knows it.
fn raw(rule: &Rule) -> Result<RawRule> {
    let unknown = |_| AutocastError::UnknownOperator { operator: rule.operator.clone() };
    let name = CString::new(rule.operator.as_str()).map_err(unknown)?;
    let (code, most_bytes) = match rule.run_as {
        RunAs::F32 => (RunCode::F32, 0),
        RunAs::Half => (RunCode::Half, 0),
        RunAs::Composed { most_bytes } => (RunCode::Composed, most_bytes),
    };
    let below = rule.below.unwrap_or(u64::MAX);
    Ok(RawRule { name, code, at_least: rule.at_least, below, most_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_without_operators_is_no_list() {
        let empty = Overrides::with(None, []);
        assert_eq!(empty.inside(0).ok(), Some(0));
        let exp = Overrides::with(None, [Rule::new("exp", RunAs::F32)]);
        let number = exp.inside(0).ok();
        assert!(number.is_some_and(|number| number > 0));
        // Inside of another list, it changes nothing.
        assert_eq!(empty.inside(number.unwrap_or(0)).ok(), number);
    }

    #[test]
    fn a_rule_for_all_sizes_leaves_none_before_it() {
        let rule = |run_as, below| Rule { below, ..Rule::new("exp", run_as) };
        let (f32, half) = (rule(RunAs::F32, None), rule(RunAs::Half, Some(8)));
        let of = |rules: &[&Rule]| Overrides::with(None, rules.iter().copied().cloned());
        assert_eq!(of(&[&half, &f32]), of(&[&f32]));
        assert_eq!(of(&[&f32, &half, &half]), of(&[&f32, &half]));
        assert_ne!(of(&[&f32, &half]), of(&[&half]));
    }
}
