package mesh

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
)

const adminURL = "http://127.0.0.1:9901"

var (
	markForm = regexp.MustCompile(`name: mark-([0-9]+)\b`)
	idForm   = regexp.MustCompile(`/ns/([^/]+)/sa/([^/]+)$`)
)

// Admin asks the admin of a node's proxy for a path and returns the answer's body;
// an answer other than 200 is an error.
func (m *Mesh) Admin(ctx context.Context, node int, path string) ([]byte, error) {
	return m.request(ctx, node, http.MethodGet, adminURL+path, nil)
}

// request sends one from a node and returns the answer's body; an answer other than 200 is
// an error.
func (m *Mesh) request(ctx context.Context, node int, method, url string, body io.Reader) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}
	c := m.Rig.Nodes[node].HTTPClient()
	defer c.CloseIdleConnections()
	res, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, res.Status, b)
	}
	return b, err
}

// Status of a node's proxy.
func (m *Mesh) Status(ctx context.Context, node int) (*Status, error) {
	b, err := m.Admin(ctx, node, "/status")
	if err != nil {
		return nil, err
	}
	var s Status
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("admin /status: %w: %s", err, b)
	}
	return &s, nil
}
