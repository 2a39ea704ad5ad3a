//! Line plots as inline SVG: a horizontal axis, a vertical axis, and a legend above. The style sheet sets colours and
//! fonts.

use std::fmt::Write;

use crate::axis::{Axis, Spacing, Tick};
use crate::escape;

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
    /// The CSS class of everything that belongs to the series, which gives it a colour; see the [crate](crate).
    pub class: String,
    /// Its name in the legend.
    pub label: String,
    /// The points of its line.
    pub points: Vec<(f64, f64)>,
    /// The points of a second line, drawn faintly below the lines of the plot; empty by default.
    pub faint: Vec<(f64, f64)>,
    /// Crosses, each with the text that a pointer over it shows; empty by default. They do not widen the axes.
    pub marks: Vec<(f64, f64, String)>,
}

impl Series {
    /// Creates a line through these points, without a faint one and without crosses.
    pub fn line(class: &str, label: &str, points: Vec<(f64, f64)>) -> Self {
        let (class, label) = (class.to_owned(), label.to_owned());
        Self { class, label, points, faint: Vec::new(), marks: Vec::new() }
    }

    /// Creates a line through the exponential moving average of these points, of which each value keeps the share
    /// `keep` of the one before it, and draws the points themselves as a faint line.
    pub fn smoothed(class: &str, label: &str, points: Vec<(f64, f64)>, keep: f64) -> Self {
        let values: Vec<f64> = points.iter().map(|point| point.1).collect();
        let smooth = points.iter().zip(smooth(&values, keep)).map(|(point, y)| (point.0, y));
        let line = Self::line(class, label, smooth.collect());
        Self { faint: points, ..line }
    }

    /// The points of both lines.
    fn drawn(&self) -> impl Iterator<Item = &(f64, f64)> {
        self.faint.iter().chain(&self.points)
    }
}

/// A plot of lines over two axes, with a legend.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The text alternative of the plot.
    description: String,
    x: Axis,
    y: Axis,
    /// Later ones are drawn over earlier ones.
    series: Vec<Series>,
    /// The meaning of a cross, for the legend; empty without crosses.
    mark_name: String,
}

impl Plot {
    /// Creates a plot with a description for those who do not see it, whose axes, with these labels, span the lines of
    /// the series. The horizontal axis is linear; `spacing` is that of the vertical one.
    pub fn new(
        description: &str,
        [x, y]: [&str; 2],
        spacing: Spacing,
        series: Vec<Series>,
    ) -> Self {
        let drawn = || series.iter().flat_map(Series::drawn);
        Self {
            description: description.to_owned(),
            x: Axis::over(x, Spacing::Linear, drawn().map(|point| point.0)),
            y: Axis::over(y, spacing, drawn().map(|point| point.1)),
            series,
            mark_name: String::new(),
        }
    }

    /// Adds the crosses to the legend, with what they mean.
    pub fn mark_name(self, name: &str) -> Self {
        Self { mark_name: name.to_owned(), ..self }
    }

    /// Sets the ranges of the horizontal and of the vertical axis. Points outside are drawn at the edge.
    pub fn ranges(self, x: [f64; 2], y: [f64; 2]) -> Self {
        let (x, y) = (self.x.respanned(x.into_iter()), self.y.respanned(y.into_iter()));
        Self { x, y, ..self }
    }

    /// Returns the `<svg>` element.
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
        let marks = Some(self.mark_name.as_str()).filter(|name| !name.is_empty());
        self.series.iter().map(|series| series.label.as_str()).chain(marks).map(place).collect()
    }
}

fn write_all(svg: &mut String, plot: &Plot) -> std::fmt::Result {
    let description = escape(&plot.description);
    writeln!(svg, r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">"#)?;
    write_axes(svg, plot)?;
    for series in &plot.series {
        write_line(svg, plot, series, "raw", &series.faint)?;
    }
    for series in &plot.series {
        write_line(svg, plot, series, "curve", &series.points)?;
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
    writeln!(
        svg,
        r#"<text class="label" x="{x}" y="{}">{}</text>"#,
        HEIGHT - 8.0,
        escape(&plot.x.label)
    )?;
    let turned = format!("translate(15 {y}) rotate(-90)");
    writeln!(svg, r#"<text class="label" transform="{turned}">{}</text>"#, escape(&plot.y.label))
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
    write!(svg, r#"<polyline class="{class} {}" points=""#, escape(&series.class))?;
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
        let class = format!("curve {}", escape(&series.class));
        writeln!(svg, r#"<line class="{class}" x1="{x}" y1="{y}" x2="{end}" y2="{y}"/>"#)?;
        writeln!(
            svg,
            r#"<text class="legend" x="{text}" y="{}">{}</text>"#,
            y + 4.0,
            escape(&series.label)
        )?;
    }
    if let Some((x, row)) = plot.legend().get(plot.series.len()) {
        let y = y + row * ROW;
        writeln!(svg, r#"<path class="mark" d="{}"/>"#, cross(x + 6.0, y))?;
        let (x, y) = (x + 18.0, y + 4.0);
        writeln!(
            svg,
            r#"<text class="legend" x="{x}" y="{y}">{}</text>"#,
            escape(&plot.mark_name)
        )?;
    }
    Ok(())
}

/// An exponential moving average without start-up bias: the first value is itself.
fn smooth(values: &[f64], keep: f64) -> Vec<f64> {
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

    fn plot(spacing: Spacing, labels: &[&str]) -> Plot {
        let points = || vec![(0.0, 1.0), (10.0, 16.0)];
        let series = labels.iter().map(|label| Series::line("s", label, points())).collect();
        Plot::new("d", ["x", "y"], spacing, series)
    }

    #[test]
    fn points_land_where_the_axes_say() {
        let plot = plot(Spacing::Log2, &["s"]);
        let (left, right, top, bottom) = (LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM);
        let want = format!("{left:.1},{bottom:.1} {right:.1},{top:.1} ");
        assert!(plot.svg().contains(&format!(r#"points="{want}""#)), "{}", plot.svg());
    }

    #[test]
    fn a_long_legend_goes_on_in_the_next_line_and_the_axes_make_room() {
        let plot = plot(Spacing::Linear, &["twenty letters' name"; 6]).mark_name("crosses");
        let legend = plot.legend();
        let rows: Vec<f64> = legend.iter().map(|place| place.1).collect();
        assert_eq!(rows, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]);
        assert!(legend.iter().all(|place| place.0 >= LEFT && place.0 < WIDTH - 100.0));
        assert_eq!(plot.top(), TOP + 2.0 * ROW);
        assert_eq!(plot.at((0.0, 16.0)), (LEFT, plot.top()));
        let few = Plot { series: plot.series[..3].to_vec(), ..plot };
        assert_eq!((few.legend().len(), few.top()), (4, TOP + ROW));
    }

    #[test]
    fn ranges_replace_those_of_the_lines() {
        let plot = plot(Spacing::Linear, &["s"]).ranges([-10.0, 30.0], [0.0, 32.0]);
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        assert_eq!(plot.at((10.0, 16.0)), (middle, (TOP + HEIGHT - BOTTOM) / 2.0));
        assert_eq!(plot.at((90.0, -1.0)), (WIDTH - RIGHT, HEIGHT - BOTTOM));
    }

    #[test]
    fn every_text_is_escaped() {
        let hostile = "<script>&\"";
        let mark = vec![(0.0, 1.0, hostile.to_owned())];
        let line = Series::line(hostile, hostile, vec![(0.0, 1.0)]);
        let series = Series { marks: mark, ..line };
        let plot = Plot::new(hostile, [hostile; 2], Spacing::Linear, vec![series]);
        let svg = plot.mark_name(hostile).svg();
        assert!(!svg.contains("<script") && !svg.contains("&\""), "{svg}");
        // The description, two axes, the class of two lines, the legend's two texts, and a cross.
        assert_eq!(svg.matches("&lt;script&gt;&amp;&quot;").count(), 8, "{svg}");
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
