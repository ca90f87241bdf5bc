package outbound

import (
	"slices"

	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// clean removes what only a proxy may say (contract 5.7, 5.9). sent are the fields as
// they were; nil: nothing was removed.
func clean(h *httpmsg.Head) (sent []httpmsg.Field) {
	if !h.HasProxyOnly() {
		return nil
	}
	sent = slices.Clone(h.Fields)
	h.DelProxyOnly()
	return sent
}

const hexDigits = "0123456789abcdef"

// requestID gives the request an id unless the client sent one (contract 5.9).
func (o *Outbound) requestID(x *exchange.Exchange, rq *reqState) {
	if _, ok := x.Req.Get("x-request-id"); ok {
		return
	}
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	var u [16]byte
	a, b := c.st.rnd.Uint64(), c.st.rnd.Uint64()
	for i := range 8 {
		u[i], u[8+i] = byte(a>>(8*i)), byte(b>>(8*i))
	}
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80 // version 4, RFC 9562
	j := 0
	for i, v := range u {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			rq.reqID[j] = '-'
			j++
		}
		rq.reqID[j], rq.reqID[j+1] = hexDigits[v>>4], hexDigits[v&15]
		j += 2
	}
	x.Req.Add(hdrRequestID, rq.reqID[:])
}

// forwardedProto says what scheme the client used, unless somebody has said so (contract 5.9).
func forwardedProto(h *httpmsg.Head) {
	if _, ok := h.Get("x-forwarded-proto"); !ok {
		h.Add(hdrProto, h.Scheme)
	}
}

var (
	hdrError       = []byte("x-aether-error")
	hdrProto       = []byte("x-forwarded-proto")
	hdrRequestID   = []byte("x-request-id")
	hdrContentType = []byte("content-type")
	hdrLocation    = []byte("location")
	hdrGRPCStatus  = []byte("grpc-status")
	hdrGRPCMessage = []byte("grpc-message")
	textPlain      = []byte("text/plain; charset=utf-8")
	appGRPC        = []byte(httpmsg.GRPC)
)
