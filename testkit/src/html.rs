//! Whether a page is well formed.

/// The open tags that are never closed. A closing tag that matches none remains on the stack, too.
pub fn unclosed_tags(html: &str) -> Vec<&str> {
    let mut open: Vec<&str> = Vec::new();
    for tag in html.split('<').skip(1).filter_map(|rest| rest.split('>').next()) {
        let name = tag.split_whitespace().next().unwrap_or_default();
        let void = tag.ends_with('/') || ["meta", "br", "!DOCTYPE"].contains(&name);
        match name.strip_prefix('/') {
            Some(closing) if open.last() == Some(&closing) => drop(open.pop()),
            _ if void => {}
            _ => open.push(name),
        }
    }
    open
}
