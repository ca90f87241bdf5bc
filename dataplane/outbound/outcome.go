package outbound

import (
	"bytes"
	"errors"

	"aether/dataplane/engine"
	"aether/dataplane/exchange"
)

// flags are the response flags (Envoy's short names) that the rules of contract
// 5.7 know.
type flags uint8

const (
	flagUF    flags = 1 << iota // no connection to the upstream
	flagUH                      // no healthy upstream
	flagUO                      // a bound of the upstream's was met
	flagNC                      // no such upstream
	flagUC                      // the upstream's connection ended
	flagUR                      // the upstream reset the stream
	flagLR                      // we reset it
	flagOther                   // any that the rules do not name: a broken answer, a timeout

	flagsNever = flagUF | flagUH | flagUO | flagNC     // the request never reached the application
	flagsBegun = flagsNever | flagUC | flagUR | flagLR // or it may have
	flagsCut   = flagsBegun &^ flagsNever              // of these, those that say so
)

var flagNames = [...]struct {
	name string
	flag flags
}{{"UF", flagUF}, {"UH", flagUH}, {"UO", flagUO}, {"NC", flagNC}, {"UC", flagUC}, {"UR", flagUR}, {"LR", flagLR}, {"UPE", flagOther}, {"UT", flagOther}}

// outcome is what became of an attempt, as the rules see it.
type outcome struct {
	code     int // the application's status, or that of a reply before a route; 0: a proxy answered, or nobody
	flags    flags
	overload bool // the destination's proxy took no requests
	refused  bool // the application said that it processed nothing (REFUSED_STREAM)
}

// parseOutcome reads an x-aether-outcome (contract 5.7):
//
//	<code>;<flags>;<method>;<details>
//
// ok is false for anything that is not exactly that, for another request's method, and
// for a flag that is not known: such an answer is not retried.
func parseOutcome(v, method []byte) (o outcome, ok bool) {
	code, v, ok1 := bytes.Cut(v, semicolon)
	short, v, ok2 := bytes.Cut(v, semicolon)
	m, details, ok3 := bytes.Cut(v, semicolon)
	if !ok1 || !ok2 || !ok3 || len(details) == 0 || !bytes.Equal(m, method) {
		return outcome{}, false
	}
	switch {
	case len(code) == 1 && code[0] == '0':
	case len(code) == 3 && code[0] >= '1' && code[0] <= '9' && digit(code[1]) && digit(code[2]):
		o.code = int(code[0]-'0')*100 + int(code[1]-'0')*10 + int(code[2]-'0')
	default:
		return outcome{}, false
	}
	if len(short) != 1 || short[0] != '-' {
		for more := true; more; {
			var f []byte
			f, short, more = bytes.Cut(short, comma)
			known := false
			for _, n := range flagNames {
				if string(f) == n.name {
					o.flags |= n.flag
					known = true
				}
			}
			if !known {
				return outcome{}, false
			}
		}
	}
	o.overload = bytes.HasSuffix(details, wordOverload)
	o.refused = bytes.Contains(details, wordRefused) || bytes.Contains(details, wordEnvoyRefused)
	return o, true
}

// loggedStatus is the HTTP status that an answer with this outcome has, whatever stands on the
// wire: what the destination's proxy refuses to a gRPC call leaves it as 200. 0: it does not say.
func loggedStatus(v []byte) int {
	code, v, _ := bytes.Cut(v, semicolon)
	short, _, ok := bytes.Cut(v, semicolon)
	switch {
	case !ok:
		return 0
	case len(code) == 3 && code[0] >= '1' && code[0] <= '9' && digit(code[1]) && digit(code[2]):
		return int(code[0]-'0')*100 + int(code[1]-'0')*10 + int(code[2]-'0')
	case len(code) != 1 || code[0] != '0':
		return 0
	}
	switch string(short) {
	case "UT":
		return 504
	case "UPE":
		return 502
	}
	return 503
}

var (
	semicolon    = []byte(";")
	comma        = []byte(",")
	wordOverload = []byte("overload")
	wordRefused  = []byte("REFUSED_STREAM")
	// wordEnvoyRefused is how an Envoy-based destination spells it.
	wordEnvoyRefused = []byte("remote_refused_stream_reset")
)

func digit(c byte) bool { return c >= '0' && c <= '9' }

// retriable is the five rules of contract 5.7. idempotent: the method is GET, HEAD,
// OPTIONS, TRACE, PUT or DELETE.
func (o outcome) retriable(idempotent bool) bool {
	switch {
	case o.code != 0:
		return o.code == 503 && o.flags == 0
	case o.flags == 0:
		return o.overload
	case o.flags&^flagsNever == 0:
		return true
	case o.flags&^flagsBegun == 0:
		return idempotent || o.refused
	}
	return false
}

// mayBegun reports whether an application may have been cut off in the middle of the request.
func (o outcome) mayBegun() bool { return o.code == 0 && o.flags&flagsCut != 0 && !o.refused }

// observed is the outcome of an attempt that ended here without an answer.
// reached: a session had been given the request.
func observed(code exchange.Code, reached bool, cause error) outcome {
	switch code {
	case exchange.Connect:
		return outcome{flags: flagUF}
	case exchange.Refused:
		if errors.Is(cause, engine.ErrHopFull) {
			return outcome{flags: flagUO}
		}
		return outcome{flags: flagUR, refused: true} // REFUSED_STREAM, or beyond the last stream of a GOAWAY
	case exchange.Unsent:
		return outcome{flags: flagUR, refused: true}
	case exchange.Closed:
		if !reached {
			return outcome{flags: flagUF}
		}
		return outcome{flags: flagUC}
	case exchange.TooLarge: // ENHANCE_YOUR_CALM
		return outcome{flags: flagUR}
	}
	return outcome{flags: flagOther}
}
