package gamma

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// MaxDuration bounds what a route may say; the Gateway API allows four times as much.
const MaxDuration = 99999 * time.Hour

// durationUnits of GEP-2257, the longest first.
var durationUnits = []struct {
	name string
	unit time.Duration
}{{"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}, {"ms", time.Millisecond}}

const durationForm = "write one to four numbers of at most five digits, each with its unit, h, m, s or ms, as 10s or 1m30s"

// parseDuration reads a Gateway API duration (GEP-2257); why is not empty when s is none.
func parseDuration(s string) (d time.Duration, why string) {
	rest := s
	for parts := 0; rest != "" || parts == 0; parts++ {
		n := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
		u := n
		for u < len(rest) && (rest[u] < '0' || rest[u] > '9') {
			u++
		}
		var unit time.Duration
		for _, k := range durationUnits {
			if k.name == rest[n:u] {
				unit = k.unit
			}
		}
		if n == 0 || n > 5 || unit == 0 || parts == 4 {
			return 0, fmt.Sprintf("%.40q is no duration: %s", s, durationForm)
		}
		count, _ := strconv.Atoi(rest[:n]) // five digits
		d += time.Duration(count) * unit
		rest = rest[u:]
	}
	if d > MaxDuration {
		return 0, fmt.Sprintf("%.40q is longer than %s: shorten it", s, FormatDuration(MaxDuration))
	}
	return d, ""
}

// FormatDuration is the reverse, for 0 to MaxDuration; parts of a millisecond are left out.
func FormatDuration(d time.Duration) string {
	var b strings.Builder
	for _, k := range durationUnits {
		if n := d / k.unit; n > 0 {
			fmt.Fprintf(&b, "%d%s", n, k.name)
			d -= n * k.unit
		}
	}
	if b.Len() == 0 {
		return "0s"
	}
	return b.String()
}
