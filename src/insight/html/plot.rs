//! Line plots as inline SVG: a horizontal axis, a vertical axis, and a legend above.
//!
//! The style sheet sets colours and fonts: the name of a series is its CSS class.

use super::axis::{Axis, Spacing, Tick};
use super::escape::escape;
use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 64.0;
/// Room for the right half of the last label.
const RIGHT: f64 = 22.0;
const TOP: f64 = 42.0;
const BOTTOM: f64 = 48.0;
/// The height of a line of the legend.
const ROW: f64 = 20.0;

/// One line of a plot.
#[derive(Clone, Debug)]
pub struct Series {
    /// The CSS class of everything that belongs to the series.
    pub name: &'static str,
    /// Shown in the legend.
    pub label: &'static str,
    /// Drawn as the main line, class `curve`.
    pub curve: Vec<(f64, f64)>,
    /// Drawn faintly below the curves, class `raw`; may be empty.
    pub raw: Vec<(f64, f64)>,
    /// Crosses, class `mark`, each with the text that a pointer over it shows.
    pub marks: Vec<(f64, f64, String)>,
}

impl Series {
    /// A line without anything else.
    pub fn line(name: &'static str, label: &'static str, curve: Vec<(f64, f64)>) -> Self {
        Self { name, label, curve, raw: Vec::new(), marks: Vec::new() }
    }

    /// The moving average of points as the main line, and the points themselves faintly below it.
    pub fn smoothed(
        name: &'static str,
        label: &'static str,
        points: Vec<(f64, f64)>,
        keep: f64,
    ) -> Self {
        let values: Vec<f64> = points.iter().map(|point| point.1).collect();
        let smooth = points.iter().zip(smooth(&values, keep)).map(|(point, y)| (point.0, y));
        Self { name, label, curve: smooth.collect(), raw: points, marks: Vec::new() }
    }
}

/// A plot, ready to be drawn.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The text alternative of the plot.
    pub description: &'static str,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines; later ones are drawn over earlier ones.
    pub series: Vec<Series>,
    /// What a cross means, for the legend; empty without crosses.
    pub mark_name: &'static str,
}

impl Plot {
    /// A plot whose axes, with these labels, span everything that the series draw. The horizontal one is linear.
    pub fn over(
        description: &'static str,
        [x, y]: [&'static str; 2],
        spacing: Spacing,
        series: Vec<Series>,
    ) -> Self {
        let drawn = || series.iter().flat_map(|series| series.raw.iter().chain(&series.curve));
        Self {
            description,
            x: Axis::over(x, Spacing::Linear, drawn().map(|point| point.0)),
            y: Axis::over(y, spacing, drawn().map(|point| point.1)),
            series,
            mark_name: "",
        }
    }

    /// The `<svg>` element.
    pub fn svg(&self) -> String {
        let mut svg = String::new();
        write_all(&mut svg, self).unwrap_or_default();
        svg
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let right = LEFT + self.x.position(x) * (WIDTH - LEFT - RIGHT);
        (right, HEIGHT - BOTTOM - self.y.position(y) * (HEIGHT - self.top() - BOTTOM))
    }

    /// The upper end of the axes: below the legend.
    fn top(&self) -> f64 {
        TOP + self.legend().last().map_or(0.0, |(_, row)| row * ROW)
    }

    /// The places in the legend of each series and then of the crosses: the horizontal position and the line.
    fn legend(&self) -> Vec<(f64, f64)> {
        let (mut x, mut row) = (LEFT + 8.0, 0.0);
        let place = |label: &str| {
            // The width of a line, of the gaps, and of the letters.
            let width = 62.0 + 7.0 * label.chars().count() as f64;
            if x + width > WIDTH {
                (x, row) = (LEFT + 8.0, row + 1.0);
            }
            x += width;
            (x - width, row)
        };
        let marks = Some(self.mark_name).filter(|name| !name.is_empty());
        self.series.iter().map(|series| series.label).chain(marks).map(place).collect()
    }
}

fn write_all(svg: &mut String, plot: &Plot) -> std::fmt::Result {
    let description = plot.description;
    writeln!(svg, r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">"#)?;
    write_axes(svg, plot)?;
    for series in &plot.series {
        write_line(svg, plot, series, "raw", &series.raw)?;
    }
    for series in &plot.series {
        write_line(svg, plot, series, "curve", &series.curve)?;
        write_marks(svg, plot, series)?;
    }
    write_legend(svg, plot)?;
    writeln!(svg, "</svg>")
}

fn write_axes(svg: &mut String, plot: &Plot) -> std::fmt::Result {
    let (top, bottom, end) = (plot.top(), HEIGHT - BOTTOM, WIDTH - RIGHT);
    for Tick { value, label } in plot.y.ticks() {
        let (_, y) = plot.at((0.0, value));
        writeln!(svg, r#"<line class="grid" x1="{LEFT}" y1="{y:.1}" x2="{end}" y2="{y:.1}"/>"#)?;
        writeln!(
            svg,
            r#"<text class="tick y" x="{}" y="{:.1}">{label}</text>"#,
            LEFT - 8.0,
            y + 4.0
        )?;
    }
    for Tick { value, label } in plot.x.ticks() {
        let (x, _) = plot.at((value, 0.0));
        let (tick, text) = (bottom + 5.0, bottom + 19.0);
        writeln!(svg, r#"<line class="axis" x1="{x:.1}" y1="{bottom}" x2="{x:.1}" y2="{tick}"/>"#)?;
        writeln!(svg, r#"<text class="tick x" x="{x:.1}" y="{text}">{label}</text>"#)?;
    }
    writeln!(svg, r#"<path class="axis" d="M{LEFT} {top}V{bottom}H{end}"/>"#)?;
    let (x, y) = ((LEFT + end) / 2.0, (top + bottom) / 2.0);
    writeln!(svg, r#"<text class="label" x="{x}" y="{}">{}</text>"#, HEIGHT - 8.0, plot.x.label)?;
    let turned = format!("translate(15 {y}) rotate(-90)");
    writeln!(svg, r#"<text class="label" transform="{turned}">{}</text>"#, plot.y.label)
}

fn write_line(
    svg: &mut String,
    plot: &Plot,
    series: &Series,
    class: &str,
    points: &[(f64, f64)],
) -> std::fmt::Result {
    if points.is_empty() {
        return Ok(());
    }
    write!(svg, r#"<polyline class="{class} {}" points=""#, series.name)?;
    for &point in points {
        let (x, y) = plot.at(point);
        write!(svg, "{x:.1},{y:.1} ")?;
    }
    writeln!(svg, r#""/>"#)
}

fn write_marks(svg: &mut String, plot: &Plot, series: &Series) -> std::fmt::Result {
    for (x, y, title) in &series.marks {
        let (x, y) = plot.at((*x, *y));
        write!(svg, r#"<path class="mark" d="{}">"#, cross(x, y))?;
        writeln!(svg, "<title>{}</title></path>", escape(title))?;
    }
    Ok(())
}

fn cross(x: f64, y: f64) -> String {
    format!("M{:.1} {:.1}l8 8m0 -8l-8 8", x - 4.0, y - 4.0)
}

fn write_legend(svg: &mut String, plot: &Plot) -> std::fmt::Result {
    let y = TOP - 24.0;
    for (series, (x, row)) in plot.series.iter().zip(plot.legend()) {
        let (end, text, y) = (x + 30.0, x + 37.0, y + row * ROW);
        let class = format!("curve {}", series.name);
        writeln!(svg, r#"<line class="{class}" x1="{x}" y1="{y}" x2="{end}" y2="{y}"/>"#)?;
        writeln!(
            svg,
            r#"<text class="legend" x="{text}" y="{}">{}</text>"#,
            y + 4.0,
            series.label
        )?;
    }
    if let Some((x, row)) = plot.legend().get(plot.series.len()) {
        let y = y + row * ROW;
        writeln!(svg, r#"<path class="mark" d="{}"/>"#, cross(x + 6.0, y))?;
        let (x, y) = (x + 18.0, y + 4.0);
        writeln!(svg, r#"<text class="legend" x="{x}" y="{y}">{}</text>"#, plot.mark_name)?;
    }
    Ok(())
}

/// An exponential moving average without start-up bias: the first value is itself.
pub fn smooth(values: &[f64], keep: f64) -> Vec<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    values
        .iter()
        .map(|value| {
            sum = keep * sum + (1.0 - keep) * value;
            weight = keep * weight + (1.0 - keep);
            sum / weight
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(label: &'static str) -> Series {
        let curve = vec![(0.0, 1.0), (10.0, 16.0)];
        Series { name: "s", label, curve, raw: vec![], marks: vec![] }
    }

    #[test]
    fn points_land_where_the_axes_say() {
        let x = Axis::over("x", Spacing::Linear, [0.0, 10.0].into_iter());
        let y = Axis::over("y", Spacing::Log2, [1.0, 16.0].into_iter());
        let plot = Plot { description: "d", x, y, series: vec![series("s")], mark_name: "" };
        let (left, right, top, bottom) = (LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM);
        let want = format!("{left:.1},{bottom:.1} {right:.1},{top:.1} ");
        assert!(plot.svg().contains(&format!(r#"points="{want}""#)), "{}", plot.svg());
    }

    #[test]
    fn a_long_legend_goes_on_in_the_next_line_and_the_axes_make_room() {
        let x = Axis::over("x", Spacing::Linear, [0.0, 10.0].into_iter());
        let series: Vec<_> = (0..6).map(|_| series("twenty letters' name")).collect();
        let plot = Plot { description: "d", x, y: x, series, mark_name: "crosses" };
        let legend = plot.legend();
        let rows: Vec<f64> = legend.iter().map(|place| place.1).collect();
        assert_eq!(rows, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]);
        assert!(legend.iter().all(|place| place.0 >= LEFT && place.0 < WIDTH - 100.0));
        assert_eq!(plot.top(), TOP + 2.0 * ROW);
        assert_eq!(plot.at((0.0, 10.0)), (LEFT, plot.top()));
        let few = Plot { series: plot.series[..3].to_vec(), ..plot };
        assert_eq!((few.legend().len(), few.top()), (4, TOP + ROW));
    }

    #[test]
    fn smoothing_keeps_constants_and_starts_at_the_first_value() {
        assert!(smooth(&[3.0; 20], 0.9).iter().all(|v| (v - 3.0).abs() < 1e-12));
        let steps = smooth(&[1.0, 0.0, 0.0], 0.5);
        assert_eq!(steps[0], 1.0);
        assert!(steps[0] > steps[1] && steps[1] > steps[2] && steps[2] > 0.0);
        assert!(smooth(&[], 0.9).is_empty());
    }
}
