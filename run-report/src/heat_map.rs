//! Heat maps as inline SVG: columns from left to right, rows from the top, and in each cell a shade of one colour.

use std::fmt::Write;

use crate::escape;

const WIDTH: f64 = 760.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 48.0;
/// The width of a letter in the names of rows.
const LETTER: f64 = 6.5;
/// The most letters of a row's name.
const MOST_LETTERS: usize = 34;
/// The faintest shade, which can still be seen.
const FAINTEST: f64 = 0.12;

/// The height of a row, unless another is set.
const ROW: f64 = 18.0;

/// The shade of a cell that is not empty.
#[derive(Clone, Debug)]
struct Cell {
    /// The place of its column and of its row, from 0.
    place: (usize, usize),
    /// From 0, the faintest, to 1.
    shade: f64,
    /// The text that a pointer over it shows.
    title: String,
}

/// A line across all columns.
#[derive(Clone, Debug)]
struct Bound {
    class: String,
    label: String,
    /// For each column, how many rows are above the line.
    rows: Vec<f64>,
}

/// A heat map: columns from left to right, rows from the top, and in each cell a shade of one colour.
///
/// # Examples
///
/// ```
/// use run_report::HeatMap;
///
/// let names = |names: [&str; 2]| names.map(str::to_owned).to_vec();
/// let mut map = HeatMap::new("Gradients of two layers", "step", names(["1", "2"]), names(["a", "b"]));
/// map.shade((0, 1), 0.5, "step 1, b: half");
/// assert!(map.svg().contains("<title>step 1, b: half</title>"));
/// ```
#[derive(Clone, Debug)]
pub struct HeatMap {
    description: String,
    label: String,
    columns: Vec<String>,
    rows: Vec<String>,
    cells: Vec<Cell>,
    bounds: Vec<Bound>,
    row_height: f64,
}

impl HeatMap {
    /// Creates an empty map with a description for those who do not see it, the label of its horizontal axis, and the
    /// names of its columns and rows. As many columns are named as there is room for. Rows with an empty name belong to
    /// the one above.
    pub fn new(description: &str, label: &str, columns: Vec<String>, rows: Vec<String>) -> Self {
        let (description, label) = (description.to_owned(), label.to_owned());
        let (cells, bounds) = (Vec::new(), Vec::new());
        Self { description, label, columns, rows, cells, bounds, row_height: ROW }
    }

    /// Sets the height of a row, 18 by default; the map is 760 wide.
    pub fn row_height(self, row_height: f64) -> Self {
        Self { row_height, ..self }
    }

    /// Shades the cell in a column and a row, which count from 0. The shade is from 0, the faintest, to 1; a pointer
    /// over the cell shows the title.
    pub fn shade(&mut self, place: (usize, usize), shade: f64, title: &str) {
        self.cells.push(Cell { place, shade, title: title.to_owned() });
    }

    /// Adds a line across all columns, with its CSS class and its label in the legend. `rows` says for each column how
    /// many rows are above the line.
    pub fn bound(mut self, class: &str, label: &str, rows: Vec<f64>) -> Self {
        self.bounds.push(Bound { class: class.to_owned(), label: label.to_owned(), rows });
        self
    }

    /// Returns the `<svg>` element.
    pub fn svg(&self) -> String {
        let mut svg = String::new();
        self.write_all(&mut svg).unwrap_or_default();
        svg
    }

    fn left(&self) -> f64 {
        let letters = self.rows.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        24.0 + LETTER * letters.clamp(4, MOST_LETTERS) as f64
    }

    fn top(&self) -> f64 {
        if self.bounds.is_empty() { 10.0 } else { TOP }
    }

    fn bottom(&self) -> f64 {
        self.top() + self.row_height * self.rows.len() as f64
    }

    /// The left end of a column.
    fn x(&self, column: usize) -> f64 {
        let left = self.left();
        left + (WIDTH - RIGHT - left) * column as f64 / self.columns.len().max(1) as f64
    }

    fn write_all(&self, svg: &mut String) -> std::fmt::Result {
        let (description, height) = (escape(&self.description), self.bottom() + BOTTOM);
        writeln!(
            svg,
            r#"<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{description}">"#
        )?;
        for cell in &self.cells {
            self.write_cell(svg, cell)?;
        }
        self.write_axes(svg)?;
        for (index, bound) in self.bounds.iter().enumerate() {
            self.write_bound(svg, index, bound)?;
        }
        writeln!(svg, "</svg>")
    }

    fn write_cell(&self, svg: &mut String, cell: &Cell) -> std::fmt::Result {
        let (column, row) = cell.place;
        let (x, y) = (self.x(column), self.top() + self.row_height * row as f64);
        let (width, height) = (self.x(column + 1) - x, self.row_height);
        let shade = FAINTEST + (1.0 - FAINTEST) * cell.shade.clamp(0.0, 1.0);
        write!(
            svg,
            r#"<rect class="cell" x="{x:.1}" y="{y:.1}" width="{width:.2}" height="{height}" fill-opacity="{shade:.2}">"#
        )?;
        writeln!(svg, "<title>{}</title></rect>", escape(&cell.title))
    }

    fn write_axes(&self, svg: &mut String) -> std::fmt::Result {
        let (left, top, bottom, end) = (self.left(), self.top(), self.bottom(), WIDTH - RIGHT);
        writeln!(svg, r#"<path class="axis" d="M{left} {top}V{bottom}H{end}"/>"#)?;
        for (row, name) in self.rows.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            let (x, y) = (left - 8.0, top + self.row_height * (row as f64 + 0.5) + 4.0);
            writeln!(
                svg,
                r#"<text class="tick y" x="{x}" y="{y:.1}">{}</text>"#,
                escape(&shortened(name))
            )?;
        }
        let letters = self.columns.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let room = ((end - left) / (LETTER * (letters + 3) as f64)).max(1.0) as usize;
        let stride = self.columns.len().div_ceil(room).max(1);
        for (column, name) in self.columns.iter().enumerate().step_by(stride) {
            let (x, y) = ((self.x(column) + self.x(column + 1)) / 2.0, bottom + 17.0);
            writeln!(svg, r#"<text class="tick x" x="{x:.1}" y="{y}">{}</text>"#, escape(name))?;
        }
        let (x, y) = ((left + end) / 2.0, bottom + BOTTOM - 8.0);
        writeln!(svg, r#"<text class="label" x="{x}" y="{y}">{}</text>"#, escape(&self.label))
    }

    fn write_bound(&self, svg: &mut String, index: usize, bound: &Bound) -> std::fmt::Result {
        let class = format!("curve {}", escape(&bound.class));
        write!(svg, r#"<polyline class="{class}" points=""#)?;
        for (column, &rows) in bound.rows.iter().enumerate() {
            let y = self.top() + self.row_height * rows.clamp(0.0, self.rows.len() as f64);
            write!(svg, "{:.1},{y:.1} {:.1},{y:.1} ", self.x(column), self.x(column + 1))?;
        }
        writeln!(svg, r#""/>"#)?;
        let (x, y) = (self.left() + 8.0 + 300.0 * index as f64, TOP - 18.0);
        let (end, text) = (x + 30.0, x + 37.0);
        writeln!(svg, r#"<line class="{class}" x1="{x}" y1="{y}" x2="{end}" y2="{y}"/>"#)?;
        let y = y + 4.0;
        writeln!(svg, r#"<text class="legend" x="{text}" y="{y}">{}</text>"#, escape(&bound.label))
    }
}

/// A name of which the end is shown if it is long, because the ends of paths tell more.
fn shortened(name: &str) -> String {
    let count = name.chars().count();
    if count <= MOST_LETTERS {
        return name.to_owned();
    }
    format!("…{}", name.chars().skip(count + 1 - MOST_LETTERS).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> HeatMap {
        let columns = (0..200).map(|step| step.to_string()).collect();
        let rows = ["<a>", "", "b"].map(str::to_owned).into();
        let mut map = HeatMap::new("d", "step", columns, rows).row_height(10.0);
        map.shade((199, 2), 2.0, "<t>");
        map.bound("first", "<l>", vec![1.5; 200])
    }

    #[test]
    fn cells_are_where_the_rows_and_columns_say() {
        let (map, svg) = (map(), map().svg());
        let (x, y) = (map.x(199), TOP + 20.0);
        assert!(svg.contains(&format!(r#"x="{x:.1}" y="{y:.1}""#)), "{svg}");
        assert!(svg.contains(r#"fill-opacity="1.00"><title>&lt;t&gt;</title>"#), "{svg}");
        assert!((map.x(200) - (WIDTH - RIGHT)).abs() < 1e-9);
        let line = format!("{:.1},{:.1} ", map.x(0), TOP + 15.0);
        assert!(svg.contains(&line), "{svg}");
        assert!(!svg.contains("<a>") && !svg.contains("<l>"), "{svg}");
    }

    #[test]
    fn as_many_columns_are_named_as_there_is_room_for() {
        let svg = map().svg();
        let named = svg.matches(r#"class="tick x""#).count();
        assert!((10..=20).contains(&named), "{named}");
    }

    #[test]
    fn long_names_are_cut_at_their_beginning() {
        let name = format!("{}end", "x".repeat(50));
        assert_eq!(shortened(&name).chars().count(), MOST_LETTERS);
        assert!(shortened(&name).ends_with("xend"));
        assert_eq!(shortened("short"), "short");
    }
}
