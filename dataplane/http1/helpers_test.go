package http1

import (
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
)

func mustRequest(tb testing.TB, s string) *httpmsg.Head {
	tb.Helper()
	var p Parser
	h := new(httpmsg.Head)
	if n, _, err := p.Request([]byte(s), h); err != nil || n == 0 {
		tb.Fatalf("%q: n %d, %v", s, n, err)
	}
	return h
}

func mustResponse(tb testing.TB, s string, head bool) *httpmsg.Head {
	tb.Helper()
	var p Parser
	h := new(httpmsg.Head)
	if n, _, err := p.Response([]byte(s), h, head); err != nil || n == 0 {
		tb.Fatalf("%q: n %d, %v", s, n, err)
	}
	return h
}

// text writes a head with its framing the way the tables expect it:
//
//	GET http cart:8080 /x len=0 none | accept: a | te: trailers !close !expect !upgrade=websocket
func text(h *httpmsg.Head, f Framing) string {
	var b strings.Builder
	if h.Status != 0 {
		fmt.Fprintf(&b, "%d", h.Status)
	} else {
		fmt.Fprintf(&b, "%s %s %s %s", h.Method, h.Scheme, orDash(h.Authority), orDash(h.Path))
	}
	fmt.Fprintf(&b, " len=%d %v", h.Length, f)
	for _, fd := range h.Fields {
		fmt.Fprintf(&b, " | %s: %s", fd.Name, fd.Value)
	}
	if h.Minor == 0 {
		b.WriteString(" !1.0")
	}
	if h.Close {
		b.WriteString(" !close")
	}
	if h.Expect {
		b.WriteString(" !expect")
	}
	if h.Upgrade != nil {
		fmt.Fprintf(&b, " !upgrade=%s", h.Upgrade)
	}
	return b.String()
}

func orDash(b []byte) string {
	if len(b) == 0 {
		return "-"
	}
	return string(b)
}

// events is what a peer would see of a stream of messages: a line an event.
// The stream is fed in the pieces that cut gives, each head and body call
// seeing what has arrived and was not used yet, at a fresh address every time.
type side struct {
	response, head bool
	limits         Limits
}

func (s side) events(stream []byte, cuts ...int) string {
	p := Parser{Limits: s.limits}
	var r BodyReader
	var h httpmsg.Head
	var out, body strings.Builder
	inBody := false
	var have []byte
	flush := func() {
		if body.Len() > 0 {
			fmt.Fprintf(&out, "body %q\n", body.String())
			body.Reset()
		}
	}
	for i := 0; i <= len(cuts); i++ {
		from, to := 0, len(stream)
		if i > 0 {
			from = cuts[i-1]
		}
		if i < len(cuts) {
			to = cuts[i]
		}
		have = append(append(make([]byte, 0, len(have)+to-from), have...), stream[from:to]...)
		for {
			if !inBody {
				n, f, err := 0, None, error(nil)
				if s.response {
					n, f, err = p.Response(have, &h, s.head)
				} else {
					n, f, err = p.Request(have, &h)
				}
				if err != nil {
					return out.String() + "error " + err.Error() + "\n"
				}
				if n == 0 {
					break
				}
				out.WriteString(text(&h, f) + "\n")
				have, inBody = have[n:], true
				r.Start(f, h.Length)
			}
			data, used, done, err := r.Next(have)
			body.Write(data)
			have = have[used:]
			if err != nil {
				flush()
				return out.String() + "error " + err.Error() + "\n"
			}
			if done {
				flush()
				for _, t := range r.Trailers() {
					fmt.Fprintf(&out, "trailer %s: %s\n", t.Name, t.Value)
				}
				out.WriteString("end\n")
				inBody = false
			} else if used == 0 {
				break
			}
		}
	}
	flush()
	fmt.Fprintf(&out, "left %q\n", have)
	return out.String()
}
