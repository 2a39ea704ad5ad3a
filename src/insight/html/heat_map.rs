//! Heat maps as inline SVG: columns from left to right, rows from the top, and in each cell a shade of one colour.

use std::fmt::Write;

use super::axis::escape;

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

/// The shade of a cell that is not empty.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The place of its column and of its row, from 0.
    pub place: (usize, usize),
    /// From 0, the faintest, to 1.
    pub shade: f64,
    /// The text that a pointer over it shows.
    pub title: String,
}

/// A line across all columns.
#[derive(Clone, Debug)]
pub struct Bound {
    /// The CSS class of the line.
    pub name: &'static str,
    /// Shown in the legend.
    pub label: &'static str,
    /// For each column, how many rows are above the line.
    pub rows: Vec<f64>,
}

/// A heat map, ready to be drawn.
#[derive(Clone, Debug)]
pub struct HeatMap {
    /// The text alternative of the map.
    pub description: &'static str,
    /// The label of the horizontal axis.
    pub label: &'static str,
    /// The names of the columns, of which as many are shown as there is room for.
    pub columns: Vec<String>,
    /// The names of the rows. Rows without a name belong to the one above.
    pub rows: Vec<String>,
    /// The cells that are not empty.
    pub cells: Vec<Cell>,
    /// Lines over the cells.
    pub bounds: Vec<Bound>,
    /// The height of a row.
    pub row_height: f64,
}

impl HeatMap {
    /// The `<svg>` element.
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
        let (description, height) = (escape(self.description), self.bottom() + BOTTOM);
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
        writeln!(svg, r#"<text class="label" x="{x}" y="{y}">{}</text>"#, escape(self.label))
    }

    fn write_bound(&self, svg: &mut String, index: usize, bound: &Bound) -> std::fmt::Result {
        let class = format!("curve {}", bound.name);
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
        writeln!(svg, r#"<text class="legend" x="{text}" y="{y}">{}</text>"#, escape(bound.label))
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
        HeatMap {
            description: "d",
            label: "step",
            columns: (0..200).map(|step| step.to_string()).collect(),
            rows: ["<a>", "", "b"].map(str::to_owned).into(),
            cells: vec![Cell { place: (199, 2), shade: 2.0, title: "<t>".to_owned() }],
            bounds: vec![Bound { name: "first", label: "<l>", rows: vec![1.5; 200] }],
            row_height: 10.0,
        }
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
