"""The viewer: `server` answers the browser, `payload` turns trace files into what it asks for, `static/` draws."""
