package outbound

// How a wait for rows ended.
const (
	coldCame     = iota // it was decided again, and not to wait
	coldExpired         // nothing came in time
	coldGone            // the client left
	coldOverflow        // as many waited as may: it did not
	coldResults
)

// ColdResults names how waits for rows end.
var ColdResults = [coldResults]string{"came", "expired", "gone", "overflow"}

// How mirrors end, as they are counted.
const (
	mirrorAnswered = iota
	mirrorFailed   // no endpoint, no connection, or one that broke
	mirrorSlow     // it did not take the body as fast as it came
	mirrorCut      // the request it is a copy of ended before its body had
	mirrorTimeout
	mirrorOverflow // not sent: too many were under way
	mirrorResults
)

// MirrorResults are the names of what Outbound.Mirrored counts.
var MirrorResults = [mirrorResults]string{"answered", "failed", "slow", "cut", "timeout", "overflow"}
