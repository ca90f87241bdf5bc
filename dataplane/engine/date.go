package engine

import (
	"time"
)

// dateForm is IMF-fixdate (RFC 9110 5.6.7) for a time in UTC.
const dateForm = "Mon, 02 Jan 2006 15:04:05 GMT"

// dates is the Date of answers that have none: what the clock said when its second began, as a loop last saw it.
// The zero value is ready. What at returns is valid until the next second's.
type dates struct {
	text  [len(dateForm)]byte
	until int64 // on the loop's clock: the second ends
}

// at is the date now, at mono on the loop's clock. The clock is read at most once a second.
func (d *dates) at(mono int64, clock func() time.Time) []byte {
	if mono >= d.until {
		now := clock().UTC()
		now.AppendFormat(d.text[:0], dateForm)
		d.until = mono + int64(time.Second) - int64(now.Nanosecond())
	}
	return d.text[:]
}

var fieldDate = []byte("date")
