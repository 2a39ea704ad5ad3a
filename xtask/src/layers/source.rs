//! What a file of Rust names: the paths in its code, and what stands behind them. Read from its tokens, without
//! comments, strings, tests and what only the documentation uses.

use std::collections::{BTreeMap, BTreeSet};

/// The segments of a path, which begins with `crate` or in the module that names it.
pub(super) type Path = Vec<String>;

/// The names of a file.
#[derive(Debug, Default)]
pub(super) struct Source {
    /// What the file brings in by `use`, under the names that it has here.
    pub(super) imports: BTreeMap<String, Path>,
    /// The modules of which it brings in everything.
    pub(super) globs: Vec<Path>,
    /// What it defines.
    pub(super) defined: BTreeSet<String>,
    /// The paths that it uses: all but those that it only hands on by `pub use`.
    pub(super) used: BTreeSet<Path>,
}

impl Source {
    /// Reads the file of a module.
    pub(super) fn read(module: &[String], text: &str) -> Self {
        let mut source = Self::default();
        let tokens = without_other_builds(tokens(text));
        let mut scope = Scope { file: module, inline: Vec::new() };
        source.add(&mut tokens.into_iter().peekable(), &mut scope);
        source
    }

    fn add(&mut self, tokens: &mut Tokens, scope: &mut Scope<'_>) {
        let mut is_public = false;
        while let Some(token) = tokens.next() {
            match token.as_str() {
                "pub" => {
                    is_public = true;
                    skip_group(tokens);
                    continue;
                }
                "use" => self.add_use(tokens, scope, is_public),
                "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "union" => {
                    self.defined.extend(tokens.peek().cloned());
                }
                "mod" => scope.enter_inline(tokens),
                "{" | "}" => scope.brace(&token),
                first if is_name(first) => {
                    let path = path(token.clone(), tokens);
                    self.used.insert(scope.absolute(path));
                }
                _ => {}
            }
            is_public = false;
        }
    }

    fn add_use(&mut self, tokens: &mut Tokens, scope: &Scope<'_>, is_public: bool) {
        let mut found = Vec::new();
        tree(tokens, &Path::new(), &mut found);
        for (name, path) in found {
            let path = scope.absolute(path);
            if name.as_deref() == Some("*") {
                self.globs.push(path);
                continue;
            }
            if !is_public {
                self.used.insert(path.clone());
            }
            self.imports.extend(name.map(|name| (name, path)));
        }
    }
}

type Tokens = std::iter::Peekable<std::vec::IntoIter<String>>;

/// Where in a file a path is.
struct Scope<'a> {
    file: &'a [String],
    /// The modules inside of the file around it, and the number of braces that are open in each.
    inline: Vec<(String, usize)>,
}

impl Scope<'_> {
    fn enter_inline(&mut self, tokens: &mut Tokens) {
        let name = tokens.next().unwrap_or_default();
        if tokens.next_if(|token| token == "{").is_some() {
            self.inline.push((name, 1));
        }
    }

    fn brace(&mut self, token: &str) {
        let Some((_, open)) = self.inline.last_mut() else { return };
        *open = if token == "{" { *open + 1 } else { *open - 1 };
        if *open == 0 {
            self.inline.pop();
        }
    }

    /// A path from the root of the crate, unless it begins with a name that is known only here.
    fn absolute(&self, path: Path) -> Path {
        if !["self", "super"].contains(&path.first().map_or("", String::as_str)) {
            return path;
        }
        let inline = self.inline.iter().map(|(name, _)| name);
        let mut module: Path = self.file.iter().chain(inline).cloned().collect();
        let mut rest = path.into_iter().peekable();
        while let Some(step) = rest.next_if(|step| step == "super" || step == "self") {
            if step == "super" {
                module.pop();
            }
        }
        std::iter::once("crate".to_owned()).chain(module).chain(rest).collect()
    }
}

/// Names and punctuation. What is in comments and quotes is left out.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if let Some(left_out) = left_out(rest, first) {
            rest = &rest[left_out..];
            continue;
        }
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let length = match first {
            first if is_part(first) => rest.find(|c| !is_part(c)).unwrap_or(rest.len()),
            ':' if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        tokens.push(token.to_owned());
        rest = after;
    }
    tokens
}

/// The length of a space, a comment or a quote at the beginning of a text.
fn left_out(text: &str, first: char) -> Option<usize> {
    let through = |end: &str| text.find(end).map_or(text.len(), |at| at + end.len());
    match first {
        _ if first.is_whitespace() => Some(first.len_utf8()),
        '/' if text.starts_with("//") => Some(through("\n")),
        '/' if text.starts_with("/*") => Some(through("*/")),
        '"' | '\'' => Some(quoted(text, first)),
        _ => raw_quoted(text),
    }
}

/// The length of a string or a character. A lifetime has no second quote.
fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return at + 1,
            _ if quote == '\'' && at > 1 && !text.starts_with("'\\") => return 1,
            _ => {}
        }
    }
    1
}

/// The length of a raw string.
fn raw_quoted(text: &str) -> Option<usize> {
    let rest = text.strip_prefix('r')?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let content = rest[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let behind = content.find(&end).map_or("", |at| &content[at + end.len()..]);
    Some(text.len() - behind.len())
}

/// Leaves out the items behind `#[cfg(test)]` and `#[cfg(doc)]`, and the attributes of all others.
fn without_other_builds(tokens: Vec<String>) -> Vec<String> {
    let mut kept = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        if token != "#" {
            kept.push(token);
            continue;
        }
        tokens.next_if(|token| token == "!");
        let attribute = skip_group(&mut tokens);
        let is = |place: usize, word: &str| attribute.get(place).is_some_and(|token| token == word);
        if is(1, "cfg") && (is(3, "test") || is(3, "doc")) {
            skip_item(&mut tokens);
        }
    }
    kept
}

/// Takes what is between brackets of any kind, if it comes next, and returns it with the brackets.
fn skip_group(tokens: &mut Tokens) -> Vec<String> {
    let mut group = Vec::new();
    if !tokens.peek().is_some_and(|token| "([{".contains(token.as_str())) {
        return group;
    }
    let mut open = 0;
    for token in tokens.by_ref() {
        match token.as_str() {
            "(" | "[" | "{" => open += 1,
            ")" | "]" | "}" => open -= 1,
            _ => {}
        }
        group.push(token);
        if open == 0 {
            break;
        }
    }
    group
}

fn skip_item(tokens: &mut Tokens) {
    let mut is_use = false;
    while let Some(token) = tokens.peek() {
        is_use |= token == "use";
        let ends = token == ";" || (token == "{" && !is_use);
        if skip_group(tokens).is_empty() {
            tokens.next();
        }
        if ends {
            break;
        }
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// A path that begins with a name.
fn path(first: String, tokens: &mut Tokens) -> Path {
    let mut path = vec![first];
    while tokens.next_if(|token| token == "::").is_some() {
        match tokens.next_if(|token| is_name(token)) {
            Some(name) => path.push(name),
            None => break,
        }
    }
    path
}

/// Reads what comes after `use`: each path with the name that it has here, `*` for all that a module has, and `None`
/// for what has no name.
fn tree(tokens: &mut Tokens, before: &Path, found: &mut Vec<(Option<String>, Path)>) {
    let mut path = before.clone();
    while let Some(token) = tokens.next_if(|token| token != "," && token != "}" && token != ";") {
        match token.as_str() {
            "::" => {}
            "{" => {
                while tokens.peek().is_some_and(|token| token != "}") {
                    tree(tokens, &path, found);
                    if tokens.next_if(|token| token == ",").is_none() {
                        break;
                    }
                }
                tokens.next();
                return;
            }
            "*" => return found.push((Some(token), path)),
            "as" => {
                let name = tokens.next().filter(|name| name != "_");
                return found.push((name, path));
            }
            // The module that the list is of.
            "self" if path.len() > 1 || !before.is_empty() => {}
            _ => path.push(token),
        }
    }
    found.push((path.last().cloned(), path));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Source {
        Source::read(&["a".to_owned(), "b".to_owned()], text)
    }

    fn used(text: &str) -> Vec<String> {
        read(text).used.into_iter().map(|path| path.join("::")).collect()
    }

    #[test]
    fn paths_are_found_in_lists_of_imports_and_in_code() {
        let text = "use crate::{c::{self as d, E, f::*}, G};\nuse super::h::I as _;\nmod j { use super::k; }\n";
        let paths = ["crate::G", "crate::a::b::k", "crate::a::h::I", "crate::c", "crate::c::E"];
        assert_eq!(used(text), paths);
        let source = read(text);
        assert_eq!(source.imports["d"], ["crate", "c"]);
        assert_eq!(source.globs, [["crate", "c", "f"]]);
        assert_eq!(used("x(self::l::m::<N>(), d::o!())"), ["N", "crate::a::b::l::m", "d::o", "x"]);
    }

    #[test]
    fn comments_quotes_tests_and_documentation_name_nothing() {
        assert!(used("// a::b\n/* a::b */ \"a::b \\\" c\" r#\"a::\"b\"#").is_empty());
        assert_eq!(used("'x' '\\'' 'a ").len(), 1, "the name of a lifetime");
        assert!(used("#[cfg(test)]\nmod tests { use crate::c; fn f() { c() } }").is_empty());
        assert!(used("#[cfg(doc)]\nuse crate::{c, d};\n#[cfg(test)]\nuse crate::e;").is_empty());
        assert_eq!(used("#[derive(F)]\n#[cfg(feature = \"x\")]\nuse crate::g;"), ["crate::g"]);
    }

    #[test]
    fn what_is_only_handed_on_is_not_used() {
        assert!(used("pub(crate) use c::D;\npub use e::{F, G};").is_empty());
        let defined = read("pub const fn f() {}\nstruct S;").defined;
        assert!(["f", "S"].iter().all(|name| defined.contains(*name)), "{defined:?}");
    }
}
